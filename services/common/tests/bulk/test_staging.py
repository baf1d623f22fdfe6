"""Staging files: room is taken up front, the file goes away, and another mapping sees the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime_service.bulk import FileStaging, StagingError
from vime_service.bulk.staging import map_file


def test_another_mapping_sees_the_staged_bytes_and_close_deletes_the_file(tmp_path: Path) -> None:
    staging = FileStaging(tmp_path / "v1", 1000)
    staging.buffer.fill_(42)
    assert map_file(tmp_path / "v1", 1000).eq(42).all()
    assert (tmp_path / "v1").stat().st_mode & 0o777 == 0o600
    staging.close()
    staging.close()
    assert not (tmp_path / "v1").exists()


def test_more_than_the_free_room_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match=r"has \d+ bytes free, staging needs 1125899906842624"):
        FileStaging(tmp_path / "v1", 1 << 50)
    assert not (tmp_path / "v1").exists()


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "v1").write_text("precious")
    with pytest.raises(FileExistsError):
        FileStaging(tmp_path / "v1", 10)
    assert (tmp_path / "v1").read_text() == "precious"


def test_a_file_shorter_than_expected_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "v1").write_bytes(b"abc")
    with pytest.raises(StagingError, match="has 3 bytes, 4 are expected"):
        map_file(tmp_path / "v1", 4)
