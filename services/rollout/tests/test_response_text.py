"""Text decoded piece by piece is the text decoded at once, and no token is decoded again and again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from vime_rollout.engine import EngineEnd, FinishReason
from vime_rollout.engines.fake import BOS, EOS, ByteTokenizer
from vime_rollout.engines.hf_tokenizer import HfTokenizer
from vime_rollout.response_text import ResponseText

from .conftest import make_tokenizer

TEXT = "Zażółć gęślą jaźń 🦔 – naïve, 你好! " * 20
LENGTH = EngineEnd(FinishReason.LENGTH, None, None, 0)


class Counting(ByteTokenizer):
    """How many ids were decoded."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


class SpaceEating(ByteTokenizer):
    """Drops the space that a text begins with, as SentencePiece tokenizers do."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return super().decode(token_ids, skip_special_tokens).removeprefix(" ")


def pieces_of(text: ResponseText, ids: Sequence[int], size: int, end: EngineEnd = LENGTH) -> list[str]:
    counts = [*range(size, len(ids), size), len(ids)]
    return [text.grow(ids[:count], end if count == len(ids) else None) for count in counts]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SpaceEating()])
def test_pieces_put_together_are_the_whole_text(tokenizer: ByteTokenizer, size: int) -> None:
    ids = list(TEXT.encode())
    pieces = pieces_of(ResponseText(tokenizer, [], []), ids, size)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_that_are_no_text_are_the_same_in_pieces(seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 260, 300).tolist()
    assert "".join(pieces_of(ResponseText(ByteTokenizer(), [], []), ids, 4)) == ByteTokenizer().decode(ids)


@pytest.mark.parametrize("cut", [3, 4, 5])  # inside a character, and between two
def test_the_text_of_resumed_ids_is_not_returned(cut: int) -> None:
    ids = list("Zażółć gęślą".encode())
    pieces = pieces_of(ResponseText(ByteTokenizer(), ids[:cut], []), ids[cut:], 2)
    assert bytes(ids[:cut]).decode(errors="ignore") + "".join(pieces) == "Zażółć gęślą"


@pytest.mark.parametrize("stops", [[], ["zzz"], ["文c!!"], ["中文c?", "\U0001f600!"]])
@pytest.mark.parametrize("cut", range(1, 12))
@pytest.mark.parametrize("end", [None, EngineEnd(FinishReason.ABORT, None, None, 0)])
def test_what_was_held_back_when_a_stream_broke_is_returned_by_the_call_that_resumes_it(
    stops: list[str], cut: int, end: EngineEnd | None
) -> None:
    tokenizer = HfTokenizer(make_tokenizer())
    ids = tokenizer.encode_text("😀b中文c")
    assert len(ids) == 12
    first = ResponseText(tokenizer, [], stops).grow(ids[:cut], end)
    rest = ResponseText(tokenizer, ids[:cut], stops).grow(ids[cut:], LENGTH)
    assert (first + rest, "\ufffd" in first) == ("😀b中文c", False)


def test_special_tokens_are_left_out_if_asked() -> None:
    text = ResponseText(ByteTokenizer(), [], [], skip_special_tokens=True)
    assert text.grow([BOS, *b"one", BOS, *b"two"], LENGTH) == "onetwo"


def test_the_terminating_id_has_no_text_and_a_stop_string_cuts() -> None:
    ids = [*b"one two three", EOS]
    stop = EngineEnd(FinishReason.STOP, None, None, 0)
    assert "".join(pieces_of(ResponseText(ByteTokenizer(), [], []), ids, 3, stop)) == "one two three"
    matched = EngineEnd(FinishReason.STOP, " two", None, 0)
    pieces = pieces_of(ResponseText(ByteTokenizer(), [], [" two"]), list(b"one two"), 2, matched)
    assert "".join(pieces) == "one"
    assert pieces[1] == "e"  # the blank may be the beginning of the stop string
    kept = ResponseText(ByteTokenizer(), [], [" two"], keep_stop=True)
    assert "".join(pieces_of(kept, list(b"one two"), 2, matched)) == "one two"


def test_a_long_response_is_decoded_in_proportion_to_its_length() -> None:
    tokenizer = Counting()
    ids = list(b"x" * 32000)
    pieces_of(ResponseText(tokenizer, [], []), ids, 32)
    assert tokenizer.decoded < 4 * len(ids)
