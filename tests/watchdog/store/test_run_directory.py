"""The last words of a launch are written on a full disk, too."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from torch_watchdog.store.run_directory import reserve, write_json, write_last

VALUE = {"exit_code": 0}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_json(tmp_path / "job.json", {"exit_code": None})
    reserve(tmp_path / "reserved", 4096)
    return tmp_path / "job.json"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Refuses the next syncs of a file: as many as are in the list."""
    refused, sync = [True], os.fsync

    def fsync(descriptor: int) -> None:
        if refused:
            refused.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return refused


def test_what_is_reserved_takes_room_and_is_given_back(file: Path) -> None:
    reserved = file.with_name("reserved")
    assert reserved.stat().st_blocks * 512 >= 4096
    write_last(file, VALUE, reserved=reserved)
    assert json.loads(file.read_text()) == VALUE and os.listdir(file.parent) == ["job.json"]


def test_on_a_full_disk_it_takes_the_place_of_what_was_reserved(file: Path, full: list[bool]) -> None:
    reserved = file.with_name("reserved")
    inode = reserved.stat().st_ino
    write_last(file, VALUE, reserved=reserved)
    assert json.loads(file.read_text()) == VALUE and file.stat().st_ino == inode and os.listdir(file.parent) == ["job.json"]


def test_where_a_file_is_never_written_in_place_it_takes_the_room_of_it(file: Path, full: list[bool]) -> None:
    full.append(True)
    write_last(file, VALUE, reserved=file.with_name("reserved"))
    assert json.loads(file.read_text()) == VALUE and os.listdir(file.parent) == ["job.json"]


def test_without_room_at_all_the_record_of_the_start_stays(file: Path, full: list[bool]) -> None:
    full += [True, True]
    with pytest.raises(OSError, match="No space"):
        write_last(file, VALUE, reserved=file.with_name("reserved"))
    assert json.loads(file.read_text()) == {"exit_code": None}


def test_nothing_is_reserved_where_nothing_can_be(tmp_path: Path) -> None:
    reserve(tmp_path / "no" / "reserved", 4096)
    assert os.listdir(tmp_path) == []
