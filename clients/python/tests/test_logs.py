"""A log line is one JSON object, carries its trace, and never a secret."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from vime_client.logs import LogConfig, get_logger, redact, register_secret, setup_logging
from vime_client.redaction import STARS, starred

log = get_logger("vime_client.tests")


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Any]:
    file = tmp_path / "logs" / "buffer.jsonl"
    setup_logging("buffer", LogConfig(file=file, stderr=False, level="DEBUG"))
    yield lambda: [json.loads(line) for line in file.read_text().splitlines()]
    setup_logging("buffer", LogConfig(stderr=False))
    logging.getLogger().setLevel(logging.WARNING)


def test_a_line_holds_time_level_service_and_fields(lines: Any) -> None:
    log.info("lease expired", group_id="g7", attempt=2, where={"path": Path("/x")})
    (line,) = lines()
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "INFO",
        "service": "buffer",
        "logger": "vime_client.tests",
        "msg": "lease expired",
        "fields": {"group_id": "g7", "attempt": 2, "where": {"path": "/x"}},
    }


def test_a_line_inside_a_span_carries_its_trace(lines: Any) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("step") as span:
        log.info("trained")
    assert lines()[0]["trace_id"] == f"{span.get_span_context().trace_id:032x}"


def test_an_exception_keeps_its_stack_on_one_line(lines: Any) -> None:
    try:
        raise ZeroDivisionError("no tokens")
    except ZeroDivisionError as error:
        log.error("loss failed", exc_info=error)
    (line,) = lines()
    assert "ZeroDivisionError: no tokens" in line["error"]
    assert "Traceback" in line["error"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("failed: http://user:PASS@host:4317/v1", "failed: http://[redacted]@host:4317/v1"),
        ("to grpc+tls://PASS@h:1, https://a.b/c?x=1", "to grpc+tls://[redacted]@h:1, https://a.b/c?x=1"),
        ("no scheme: user:PASS@host:4317", "no scheme: [redacted]@host:4317"),
        ("https://h/x?sig=PASS&n=1", "https://h/x?sig=[redacted]&n=1"),
        ("a@b.org wrote reward.py:score to [::1]:80", "a@b.org wrote reward.py:score to [::1]:80"),
    ],
)
def test_addresses_lose_their_credentials_everywhere(text: str, shown: str, lines: Any) -> None:
    assert redact(text) == shown
    log.error("not sent: " + text, address=text, env={"DB_PASS": "PASS"})
    (line,) = lines()
    assert line["msg"] == "not sent: " + shown
    assert line["fields"] == {"address": shown, "env": {"DB_PASS": STARS}}


@pytest.mark.parametrize("name", ["cls_token", "CLS_TOKEN", "eos_token", "first_token", "max_tokens", "monkey"])
def test_words_of_a_tokenizer_are_no_secrets(name: str) -> None:
    assert starred({name: "[CLS]"}) == {name: "[CLS]"}


@pytest.mark.parametrize("name", ["hf_token", "token", "app_credentials", "SESSION_COOKIE", "OPENAI_API_KEY"])
def test_names_of_secrets_are_known(name: str) -> None:
    assert starred({name: "[CLS]"}) == {name: STARS}


def test_text_that_is_no_valid_unicode_is_logged_too(lines: Any) -> None:
    log.warning("the reward said \ud83d", detail="\ud83d")
    assert lines()[0]["msg"] == "the reward said \ud83d"


def test_secrets_are_starred_out_of_messages_fields_and_stacks(lines: Any) -> None:
    register_secret("hunter2-token")
    log.warning("sending Bearer abc.def to hunter2-token", token="abc", auth_token="x", note="password=letmein, ok")
    try:
        raise ValueError("refused hunter2-token")
    except ValueError as error:
        log.error("failed", exc_info=error)
    text = json.dumps(lines())
    assert not [secret for secret in ("abc", "hunter2", "letmein") if secret in text]
    assert lines()[0]["fields"]["note"] == "password=[redacted], ok"


@pytest.mark.parametrize("part", ["a-", "a.", "a+", "x%"])
def test_text_without_blanks_takes_time_by_its_length_not_its_square(part: str) -> None:
    text = part * 150_000
    assert redact(text) == text


def test_what_only_looks_like_a_secret_stays(lines: Any) -> None:
    log.info("max_tokens = 5, token ids follow", first_token=3, prompt_token_ids=[1, 2], max_tokens=5)
    assert lines()[0]["fields"] == {"first_token": 3, "prompt_token_ids": [1, 2], "max_tokens": 5}
    assert redact("the secret is out there; bearer of news") == "the secret is out there; bearer [redacted] news"


def test_people_get_a_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("buffer", LogConfig(stderr=True))
    log.info("ready", address="127.0.0.1:1")
    setup_logging("buffer", LogConfig(stderr=False))
    said = capsys.readouterr().err
    assert said.endswith("INFO    buffer: ready  (address=127.0.0.1:1)\n")
