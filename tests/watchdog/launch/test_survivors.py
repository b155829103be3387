"""What lives on of a launch that was killed: told by its processes, never by a mere pid."""

from __future__ import annotations

import getpass
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torch_watchdog.launch.places import open_ring_dir
from torch_watchdog.launch.survivors import survivors

SESSION = "00c0ffee00c0ffee"
RECORD: Mapping[str, Any] = {"session": SESSION, "host": socket.gethostname(), "user": getpass.getuser()}
LIVES = "import sys; print('up', flush=True); sys.stdin.read()"


def process(proc: Path, pid: int, *, session: str = SESSION, name: str = "python", ring: str = "", parent: int = 1) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "environ").write_bytes(b'A=1\0TORCH_WATCHDOG_AGENT={"job":"j","session":"%s"}\0' % session.encode())
    (folder / "comm").write_text(f"{name}\n")
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} {pid} 0\n")
    (folder / "maps").write_text(f"7f00-7f01 rw-s 00000000 00:1 2 /dev/shm/torch-watchdog-0/{session}/{ring} (deleted)\n" if ring else "")


def test_ranks_are_known_by_their_rings_and_no_child_or_stranger_is_taken_for_one(tmp_path: Path) -> None:
    process(tmp_path, 10, name="torchrun")
    process(tmp_path, 11, name="torch-watchdog")
    process(tmp_path, 12, ring="0-0-12.ring")
    process(tmp_path, 13, ring="0-1-13.ring")
    process(tmp_path, 14, ring="0-1-13.ring")  # a worker of the loader's: forked, so that it has the rank's mappings
    process(tmp_path, 15, session="ffee", ring="0-0-15.ring")  # of another launch
    found = survivors(RECORD, tmp_path)
    assert (found.state, found.ranks) == ("running", {0: 12, 1: 13})
    assert found.words == "goes on unwatched: the launch was killed, 2 ranks of it live on (pids 12, 13)"


def test_what_ends_it_is_told_without_what_ends_with_its_ranks_and_no_file_is_to_hold_that(tmp_path: Path) -> None:
    process(tmp_path, 10, name="torchrun")
    process(tmp_path, 11, name="torch-watchdog", parent=10)
    process(tmp_path, 12, ring="0-0-12.ring", parent=11)
    process(tmp_path, 13, name="pt_forkserver (x)", parent=12)
    process(tmp_path, 14, parent=13)
    found = survivors(RECORD, tmp_path)
    assert found.words == "goes on unwatched: the launch was killed, 1 rank of it lives on (pid 12)"
    assert found.advice == f"{found.words}; `kill 10 12` ends it"
    assert survivors({**RECORD, "host": "node-z"}, tmp_path).to_end == ()


def test_what_is_left_behind_a_failure_is_ending_and_does_not_go_on(tmp_path: Path) -> None:
    process(tmp_path, 12, ring="1-0-12.ring")
    process(tmp_path, 13, ring="1-1-13.ring")
    raised = {"kind": "rank.failed", "attempt": 1, "rank": 1, "step": 7, "text": "RuntimeError: mine"}
    for event in (raised, raised | {"kind": "rank.exited", "signal": 9}):
        found = survivors(RECORD, tmp_path, events=[event])
        assert (found.state, found.failed, found.to_end) == ("running", (1,), (12, 13))
        assert found.words == "is ending unwatched: the launch was killed after rank 1 had failed, 2 ranks of it live on (pids 12, 13)"
    for other in (raised | {"attempt": 0}, raised | {"kind": "rank.exited", "exit_code": 0}):
        assert survivors(RECORD, tmp_path, events=[other]).words.startswith("goes on unwatched")


def test_only_the_newest_attempts_ranks_are_named(tmp_path: Path) -> None:
    process(tmp_path, 12, ring="0-0-12.ring")
    process(tmp_path, 13, ring="1-0-13.ring")
    assert survivors(RECORD, tmp_path).ranks == {0: 13}


def test_a_launcher_that_lives_on_without_a_rank_is_told_too(tmp_path: Path) -> None:
    process(tmp_path, 10, name="torchrun")
    assert survivors(RECORD, tmp_path).words == "goes on unwatched: the launch was killed, 1 process of it lives on (pid 10)"


def test_keepers_alone_are_no_life(tmp_path: Path) -> None:
    process(tmp_path, 11, name="torch-watchdog")
    found = survivors(RECORD, tmp_path)
    assert found.state == "ended" and found.words.startswith("ended without a word: the launch was killed")


@pytest.mark.parametrize("other", [{"host": "node-z"}, {"user": "somebody-else"}])
def test_what_only_another_machine_or_user_can_see_is_not_called_ended(tmp_path: Path, other: dict[str, str]) -> None:
    process(tmp_path, 12, ring="0-0-12.ring")
    found = survivors({**RECORD, **other}, tmp_path)
    assert found.state == "unknown" and "can see whether it goes on" in found.words


def test_a_launch_that_lives_and_does_not_answer_has_not_ended(tmp_path: Path) -> None:
    process(tmp_path, 12, ring="0-0-12.ring")
    with open_ring_dir(SESSION):
        found = survivors(RECORD, tmp_path)
        assert (found.state, found.words) == ("running", "has not ended: the launch lives, and does not answer")
        assert found.ranks == {0: 12}
    assert survivors(RECORD, tmp_path).words.startswith("goes on unwatched")


def test_a_process_of_this_machine_is_found(tmp_path: Path) -> None:
    variables = {"TORCH_WATCHDOG_AGENT": f'{{"session":"{SESSION}"}}'}
    with subprocess.Popen([sys.executable, "-c", LIVES], env=os.environ | variables, stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert f"(pid {child.pid})" in survivors(RECORD).words
        assert child.stdin is not None
        child.stdin.close()
    assert survivors(RECORD).state == "ended"


def test_a_ring_is_found_in_the_maps_that_a_kernel_writes(tmp_path: Path) -> None:
    folder = tmp_path / SESSION
    folder.mkdir()
    ring = folder / f"0-3-{os.getpid()}.ring"
    ring.write_bytes(bytes(mmap.PAGESIZE))
    proc = tmp_path / "proc"
    process(proc, os.getpid())
    with ring.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        ring.unlink()
        (proc / str(os.getpid()) / "maps").write_bytes(Path("/proc/self/maps").read_bytes())
    assert survivors(RECORD, proc).ranks == {3: os.getpid()}
