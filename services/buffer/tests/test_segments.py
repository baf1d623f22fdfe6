"""Segment files: durable records, torn tails cut, damage named by segment and offset."""

from __future__ import annotations

import os

import pytest

from vime_buffer.segments import RECORD_OVERHEAD, Segments, record_end
from vime_buffer.values import Place
from vime_service.errors import DataLoss, StorageFailed


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "segments"


def written(folder, payloads, segment_bytes=1 << 20):
    segments = Segments(folder, segment_bytes, {})
    places = [segments.append(payload) for payload in payloads]
    segments.sync()
    return segments, places


def ends(places):
    return {place.segment: max(record_end(p) for p in places if p.segment == place.segment) for place in places}


def test_what_was_synced_is_read_back_by_a_later_process(folder):
    payloads = [os.urandom(n) for n in (0, 1, 1000, 70_000)]
    segments, places = written(folder, payloads)
    segments.close()
    again = Segments(folder, 1 << 20, ends(places))
    assert [again.read(place) for place in places] == payloads
    assert again.torn_bytes == 0


def test_a_new_file_begins_when_one_is_full_and_a_payload_larger_than_a_file_fits(folder):
    _, places = written(folder, [b"x" * 3000, b"y" * 3000, b"z" * 9000], segment_bytes=4096)
    assert [place.segment for place in places] == [1, 2, 3]


@pytest.mark.parametrize("torn", [b"V", b"VREC\xff\xff\xff\x7f" + b"\0" * 30, os.urandom(5000)])
def test_a_torn_tail_is_cut_when_the_folder_is_opened(folder, torn):
    segments, places = written(folder, [b"kept"])
    segments.close()
    path = folder / "segment-00000001.seg"
    with path.open("ab") as file:
        file.write(torn)
    again = Segments(folder, 1 << 20, ends(places))
    assert again.torn_bytes == len(torn)
    assert path.stat().st_size == record_end(places[0])
    assert again.read(places[0]) == b"kept"
    new = again.append(b"new")
    again.sync()
    assert again.read(new) == b"new"


def test_records_of_an_undone_transaction_leave_no_trace(folder):
    segments, (kept,) = written(folder, [b"kept"])
    lost = segments.append(b"lost")
    segments.roll_back()
    new = segments.append(b"new!")
    segments.sync()
    assert new == lost
    assert (segments.read(kept), segments.read(new)) == (b"kept", b"new!")


def test_one_operation_of_several_can_be_forgotten(folder):
    segments, _ = written(folder, [])
    first = segments.append(b"first")
    mark = segments.mark()
    segments.append(b"refused")
    segments.forget(mark)
    third = segments.append(b"third")
    segments.sync()
    assert (segments.read(first), segments.read(third)) == (b"first", b"third")


@pytest.mark.parametrize("where", [0, 5, RECORD_OVERHEAD - 1, RECORD_OVERHEAD, RECORD_OVERHEAD + 40])
def test_a_flipped_bit_anywhere_in_a_record_is_found_and_named(folder, where):
    segments, (first, second) = written(folder, [b"a" * 100, b"b" * 100])
    with (folder / "segment-00000001.seg").open("r+b") as file:
        file.seek(second.offset + where)
        byte = file.read(1)[0]
        file.seek(second.offset + where)
        file.write(bytes([byte ^ 0x10]))
    with pytest.raises(DataLoss) as caught:
        segments.read(second)
    assert caught.value.metadata == {"segment": "segment-00000001.seg", "offset": str(second.offset)}
    assert segments.read(first) == b"a" * 100  # its neighbour is fine


def test_a_missing_or_short_file_is_damage_not_a_crash(folder):
    segments, places = written(folder, [b"a" * 100])
    segments.close()
    os.truncate(folder / "segment-00000001.seg", 50)
    again = Segments(folder, 1 << 20, ends(places))
    with pytest.raises(DataLoss, match="ends after"):
        again.read(places[0])
    (folder / "segment-00000001.seg").unlink()
    again = Segments(folder, 1 << 20, ends(places))
    with pytest.raises(DataLoss, match="cannot be opened"):
        again.read(places[0])


def test_whole_segments_die_and_free_their_bytes(folder):
    segments, places = written(folder, [b"x" * 3000] * 4, segment_bytes=4096)
    before = segments.total_bytes
    assert segments.delete_dead([2, 4]) == [1, 3]
    assert segments.total_bytes < before
    assert segments.read(places[1]) == b"x" * 3000
    assert sorted(path.name for path in folder.iterdir()) == ["segment-00000002.seg", "segment-00000004.seg"]
    assert sorted(segments.delete_dead([])) == [2, 4]  # the one that was written to as well
    new = segments.append(b"new")
    segments.sync()
    assert segments.read(new) == b"new"


def test_segments_that_nothing_lives_in_are_gone_after_a_restart(folder):
    segments, places = written(folder, [b"x" * 3000] * 3, segment_bytes=4096)
    segments.close()
    Segments(folder, 4096, {2: record_end(places[1])})
    assert [path.name for path in folder.iterdir()] == ["segment-00000002.seg"]


def test_a_full_disk_refuses_the_record_and_keeps_the_others(folder, monkeypatch):
    segments, (kept,) = written(folder, [b"kept"])
    real = os.pwrite

    def full(fd, data, offset):
        if len(data) > 10_000:
            real(fd, bytes(data)[:4096], offset)  # part of it gets through, as on a real disk
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    mark = segments.mark()
    with pytest.raises(StorageFailed, match="No space left on device; older data is intact"):
        segments.append(b"x" * 20_000)
    segments.forget(mark)
    small = segments.append(b"small")
    segments.sync()
    assert (segments.read(kept), segments.read(small)) == (b"kept", b"small")


def test_after_a_failed_sync_the_file_is_left_and_nothing_of_it_is_acked(folder, monkeypatch):
    segments, (kept,) = written(folder, [b"kept"])
    segments.append(b"lost")
    monkeypatch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(StorageFailed, match="Input/output error"):
        segments.sync()
    monkeypatch.undo()
    segments.roll_back()
    new = segments.append(b"new")
    segments.sync()
    assert new.segment == kept.segment + 1
    assert (segments.read(kept), segments.read(new)) == (b"kept", b"new")


def test_a_file_that_fills_up_within_a_batch_and_fails_to_sync_fails_the_whole_batch(folder, monkeypatch):
    segments, _ = written(folder, [], segment_bytes=4096)
    segments.append(b"a" * 3000)
    monkeypatch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(StorageFailed):
        segments.append(b"b" * 3000)
    monkeypatch.undo()
    with pytest.raises(StorageFailed):
        segments.sync()  # the first record was never durable, although its own append succeeded
    segments.roll_back()
    segments.sync()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="file/segments"):
        Segments(tmp_path / "file" / "segments", 4096, {})


def test_a_place_that_points_nowhere_is_damage(folder):
    segments, (place,) = written(folder, [b"abc"])
    with pytest.raises(DataLoss):
        segments.read(Place(place.segment, place.offset + 1, 3))


@pytest.mark.parametrize("call", ["open", "pread"])
@pytest.mark.parametrize("number", [5, 13, 24], ids=["EIO", "EACCES", "EMFILE"])
def test_a_shortage_is_not_damage(folder, monkeypatch, call, number):
    segments, (place,) = written(folder, [b"abc"])

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageFailed, match=rf"cannot read .*segment-00000001.seg: {os.strerror(number)}") as caught:
        segments.read(place)
    assert caught.value.retry_after
    monkeypatch.undo()
    assert segments.read(place) == b"abc"


def test_a_folder_that_is_away_is_not_damage(folder):
    segments, (place,) = written(folder, [b"abc"])
    os.rename(folder, folder.with_name("away"))
    with pytest.raises(StorageFailed, match="No such file"):
        segments.read(place)
