"""JSONL sources. K35: framing and bad lines; K36: large integers."""

from __future__ import annotations

import json
import os

import pytest

from vime_buffer.settings import SourceSettings
from vime_buffer.sources import JsonlSource, SourceUnusable
from vime_service.errors import InvalidArgument

K35 = (
    b'\xef\xbb\xbf{"prompt": "one", "answer": 1}\r\n'
    b"\r\n"
    b'{"prompt": 3\r\n'
    b'{"prompt": "two"}\r\n'
    b'{"prompt": "three", "answer": 3}\r\n'
    b'{"prompt": "four", "answer": "4"}'
)


def source(tmp_path, data, seed=0, largest=1 << 30, **settings):
    path = tmp_path / "data.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return JsonlSource(SourceSettings(path=path, name="data", **settings), seed, largest)


def records(src, epoch=0):
    return [src.read(epoch, src.index_at(epoch, position)) for position in range(src.records)]


def test_k35_a_bad_line_is_named_by_its_line_in_the_file_and_its_byte(tmp_path):
    with pytest.raises(InvalidArgument, match=r"data.jsonl line 3 \(byte 37\): not valid JSON") as caught:
        source(tmp_path, K35, required_keys=("answer",))
    assert caught.value.metadata["line"] == "3"


def test_k35_a_missing_key_is_named_with_its_line(tmp_path):
    with pytest.raises(InvalidArgument, match=r'line 4 .*key "answer" is missing'):
        source(
            tmp_path, K35.replace(b'{"prompt": 3\r\n', b'{"prompt": "3", "answer": 3}\r\n'), required_keys=("answer",)
        )


def test_k35_lenient_skips_and_counts_and_leaves_no_carriage_return(tmp_path):
    src = source(tmp_path, K35, required_keys=("answer",), lenient=True)
    found = records(src)
    assert [record.prompt for record in found] == ["one", "three", "four"]
    assert src.skipped == {"json": 1, "missing_key": 1}
    assert [what.partition(": ")[0] for what in src.first_skipped] == [
        f"{tmp_path}/data.jsonl line 3 (byte 37)",
        f"{tmp_path}/data.jsonl line 4 (byte 51)",
    ]
    assert [record.record_json for record in found] == [
        '{"prompt": "one", "answer": 1}',
        '{"prompt": "three", "answer": 3}',
        '{"prompt": "four", "answer": "4"}',
    ]
    assert [record.prompt_id for record in found] == ["data:0:0", "data:0:1", "data:0:2"]


@pytest.mark.parametrize("data", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_k35_an_empty_file_is_an_error(tmp_path, data):
    with pytest.raises(InvalidArgument, match="has no records"):
        source(tmp_path, data)


def test_k35_a_file_of_bad_lines_alone_is_an_error_even_when_lenient(tmp_path):
    with pytest.raises(InvalidArgument, match="only 2 bad lines"):
        source(tmp_path, b"nonsense\n[1]\n", lenient=True)


def test_k36_numbers_reach_the_reward_as_they_stand_in_the_file(tmp_path):
    answers = ["9007199254740993", "null", "5", '"007"', "123456789012345678901", "1.10", "1e400"]
    src = source(tmp_path, "\n".join(f'{{"prompt": "p", "answer":{answer}}}' for answer in answers))
    texts = [record.record_json for record in records(src)]
    assert texts == [f'{{"prompt": "p", "answer":{answer}}}' for answer in answers]
    assert [json.loads(text)["answer"] for text in texts[:5]] == [
        9007199254740993,
        None,
        5,
        "007",
        123456789012345678901,
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"prompt": ""}', "empty"),
        (b'{"prompt": []}', "empty"),
        (b'{"prompt": 3}', "must be text"),
        (b'{"prompt": [1, "2"]}', "all of one kind"),
        (b'{"prompt": [true]}', "all of one kind"),
        (b'{"prompt": [-1]}', r"prompt\[0\] is -1: token ids are from 0 to 4294967295"),
        (b'{"prompt": [1, 18446744073709551617]}', r"prompt\[1\] is 18446744073709551617"),
        (b'{"prompt": 7}', "not a number"),
        (b'{"prompt": null}', "not null"),
        (b'{"answer": 7}', 'key "prompt" is missing'),
        (rb'{"prompt": "\ud83d"}', r"key 'prompt' holds \\ud83d, half of a surrogate pair"),
        (rb'{"prompt": "a", "x\uDC00": 1}', r"key 'x\\udc00' holds \\udc00"),
        (rb'{"prompt": "a", "deep": [{"x": ["\udfff\ud83d"]}]}', r"key 'deep' holds \\udfff"),
        (b'{"prompt": "a\xed\xa0\xbd"}', "not UTF-8"),
        (b'{"prompt": "a\x00"}', "Invalid control character"),
        (b"\x00" * 64, "not valid JSON"),
        (b'{"prompt": "a", "x": -Infinity}', "-Infinity"),
        (b'{"prompt": "a", "prompt": "b"}', "key 'prompt' is there twice"),
        (b'{"prompt": "a", "x": {"y": 1, "y": 1}}', "key 'y' is there twice"),
        (b'{"prompt": "a", "x": ' + b"[" * 100 + b"]" * 100 + b"}", "at most 100 levels"),
        (b'{"prompt": [{"role": ["user"], "content": "x"}]}', "role must be one of"),
        (b'{"prompt": [{"role": "user"}]}', "content must be text .* not null"),
        (b'{"prompt": [{"role": "tool", "content": "x", "tool_call_id": 7}]}', "tool_call_id must be text"),
        (b'{"prompt": [{"role": "assistant", "content": "x", "tool_calls": "f()"}]}', "tool_calls must be a list"),
        (b'{"prompt": [{"role": "robot", "content": "x"}]}', "role must be one of"),
        (b'{"prompt": [{"role": "user", "content": [{"image": 1}]}]}', "media is not supported"),
        (b'["prompt"]', "must be a JSON object"),
        (b'{"prompt": "a", "x": NaN}', "NaN"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "not usable JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_prompt_that_is_none_is_refused_in_one_sentence(tmp_path, line, what):
    with pytest.raises(InvalidArgument, match=f"line 2 .*{what}"):
        source(tmp_path, b'{"prompt": "good"}\n' + line)


def test_messages_and_token_ids_are_prompts(tmp_path):
    src = source(
        tmp_path,
        '{"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": null, "tool_calls": [{}]}]}\n'
        '{"prompt": [1, 2, 4294967295]}',
    )
    chat, ids = records(src)
    assert chat.prompt[1] == {"role": "assistant", "content": "", "tool_calls": [{}]}
    assert ids.prompt == [1, 2, 4294967295]


def test_line_separators_inside_strings_split_nothing(tmp_path):
    src = source(tmp_path, '{"prompt": "a\u2028b\u0085c"}\n{"prompt": "d"}')
    assert [record.prompt for record in records(src)] == ["a\u2028b\u0085c", "d"]


def test_a_line_longer_than_a_block_is_one_line(tmp_path):
    long = "x" * (3 << 20)
    src = source(tmp_path, f'{{"prompt": "{long}"}}\n{{"prompt": "b"}}\n')
    assert [record.prompt for record in records(src)] == [long, "b"]


def test_shuffle_is_a_permutation_that_seed_and_epoch_decide(tmp_path):
    data = "\n".join(f'{{"prompt": "{n}"}}' for n in range(50))
    orders = {
        (seed, epoch): tuple(source(tmp_path, data, seed, shuffle=True).index_at(epoch, p) for p in range(50))
        for seed in (0, 9)
        for epoch in (0, 1)
    }
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(orders.values())) == 4
    again = source(tmp_path, data, 9, shuffle=True)
    assert tuple(again.index_at(1, p) for p in range(50)) == orders[9, 1]


def test_limit_takes_the_first_records_and_ignores_what_follows(tmp_path):
    src = source(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\nnonsense', limit=2)
    assert src.records == 2


def test_epochs_end_or_do_not(tmp_path):
    assert source(tmp_path, '{"prompt": "a"}', epochs=2).has(1)
    assert not source(tmp_path, '{"prompt": "a"}', epochs=2).has(2)
    assert source(tmp_path, '{"prompt": "a"}').has(10**9)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"nowhere.jsonl cannot be read: No such file"):
        JsonlSource(SourceSettings(path=tmp_path / "nowhere.jsonl", name="x"), 0)


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path):
    src = source(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}')
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('\n{"prompt": "c"}')
    with pytest.raises(SourceUnusable, match="changed while the run uses it"):
        src.read(0, 0)


def test_text_that_json_spells_in_another_way_is_text(tmp_path):
    line = rb'{"prompt": "\ud83d\ude00 \u0000 \\ud83d", "x": ' + b"[" * 99 + b"]" * 99 + b"}"
    assert source(tmp_path, line).read(0, 0).prompt == "\N{GRINNING FACE} \0 \\ud83d"


def test_all_bad_lines_are_counted_and_the_first_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"line 1 \(byte 0\): not valid JSON: .*; and 11 more bad lines"):
        source(tmp_path, "{\n" * 12 + '{"prompt": "a"}')


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"PAR1" + bytes(range(256)), "is a Parquet file; it must be JSONL"),
        (b"\x1f\x8b\x08" + bytes(64), "is a gzip archive"),
        ('{"prompt": "a"}'.encode("utf-16"), "is UTF-16 text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
    ],
)
def test_another_format_under_the_name_is_called_by_its_own(tmp_path, data, what):
    for lenient in (False, True):
        with pytest.raises(SourceUnusable, match=what):
            source(tmp_path, data, lenient=lenient)


def test_a_folder_a_pipe_and_a_file_without_rights_are_named(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, what in (("", "is a folder"), ("pipe.jsonl", "is no regular file")):
        with pytest.raises(SourceUnusable, match=what):
            JsonlSource(SourceSettings(path=tmp_path / name, name="x"), 0)

    def refuse(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", refuse)
    with pytest.raises(SourceUnusable, match=r"data.jsonl cannot be read: Input/output error"):
        source(tmp_path, '{"prompt": "a"}')


def test_a_record_that_no_message_carries_is_refused_with_both_numbers(tmp_path):
    good, bad = '{"prompt": "a"}', json.dumps({"prompt": "x" * 600})
    with pytest.raises(InvalidArgument, match=r"line 2 .*needs 1214 bytes in a message, .* at most 1000"):
        source(tmp_path, f"{good}\n{bad}\n", largest=1000)
    long = json.dumps({"prompt": "x" * (3 << 20)})  # more than a block: it is never collected
    with pytest.raises(InvalidArgument, match=r"line 1 .*a line of 3145742 bytes, one record may have at most 1000"):
        source(tmp_path, f"{long}\n{good}\n", largest=1000)
    src = source(tmp_path, f"{long}\n{good}\n{bad}\n{good}", largest=1000, lenient=True)
    assert (src.skipped, [record.prompt for record in records(src)]) == ({"too_large": 2}, ["a", "a"])


def test_a_file_that_grows_while_it_is_checked_is_not_taken(tmp_path, monkeypatch):
    path, real = tmp_path / "data.jsonl", os.pread

    def grow(*arguments):
        with path.open("a") as file:
            file.write('\n{"prompt": "b"}')
        return real(*arguments)

    monkeypatch.setattr(os, "pread", grow)
    with pytest.raises(SourceUnusable, match="changed while it was read"):
        source(tmp_path, '{"prompt": "a"}')
