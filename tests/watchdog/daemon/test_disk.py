"""Reading run directories beside the daemon's work: a disk that hangs is waited for in vain, and holds up nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from torch_watchdog.daemon.disk import DiskReader, PastList
from torch_watchdog.errors import DiskAwayError
from torch_watchdog.store.past import past_jobs

LEFT = {"kind": "node.left", "exit_code": 0, "attempt": 0}


def ended(folder: Path, name: str, *events: dict[str, object]) -> Path:
    (folder / name).mkdir(exist_ok=True)
    file = folder / name / "events.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in events or (LEFT,)))
    return file


def asked(folder: Path, ask: Callable[[DiskReader], Awaitable[None]], patience_s: float = 30.0) -> None:
    async def with_it() -> None:
        with contextlib.closing(DiskReader(folder, patience_s=patience_s)) as disk:
            await ask(disk)

    asyncio.run(with_it())


def test_what_is_read_comes_back_and_so_does_what_it_raises(tmp_path: Path) -> None:
    async def ask(disk: DiskReader) -> None:
        assert await asyncio.gather(*(disk.read(lambda n=n: n) for n in range(20))) == list(range(20))
        with pytest.raises(ZeroDivisionError):
            await disk.read(lambda: 1 // 0)

    asked(tmp_path, ask)


def test_a_disk_that_hangs_is_said_and_the_list_of_ended_jobs_stays_as_it_was_read(tmp_path: Path) -> None:
    hangs = threading.Event()

    async def ask(disk: DiskReader) -> None:
        past = PastList(tmp_path, disk, patience_s=0.1)
        ended(tmp_path, "old")
        first = await past.without(())
        assert ([job.job for job in first.jobs], first.is_earlier) == (["old"], False)
        for _ in range(4):
            with pytest.raises(DiskAwayError, match=r"has not answered within 0\.2 s"):
                await disk.read(hangs.wait)
        ended(tmp_path, "new")
        while_away = await past.without(())
        assert ([job.job for job in while_away.jobs], while_away.is_earlier) == (["old"], True)
        hangs.set()
        while (back := await past.without(("old",))).is_earlier:
            pass
        assert [job.job for job in back.jobs] == ["new"]

    asked(tmp_path, ask, patience_s=0.2)


def test_many_who_ask_a_disk_that_hangs_are_told_at_once(tmp_path: Path) -> None:
    hangs = threading.Event()

    async def ask(disk: DiskReader) -> None:
        waiting = [asyncio.create_task(disk.read(hangs.wait)) for _ in range(80)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        assert all("many wait for it already" in str(task.exception()) for task in done) and done
        hangs.set()
        await asyncio.gather(*waiting, return_exceptions=True)

    asked(tmp_path, ask)


def test_a_process_ends_while_its_disk_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it waits for a writer that never comes
    script = f"""
import asyncio, contextlib, pathlib
from torch_watchdog.daemon.disk import DiskReader
from torch_watchdog.errors import DiskAwayError
disk = DiskReader(pathlib.Path("."), patience_s=0.2)
with contextlib.suppress(DiskAwayError):
    asyncio.run(disk.read(lambda: open({str(tmp_path / "pipe")!r})))
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_an_ended_job_is_read_again_only_where_its_files_have_changed(tmp_path: Path) -> None:
    file = ended(tmp_path, "job")
    known: dict = {}  # type: ignore[type-arg]
    (first,), _ = past_jobs(tmp_path, but=(), now_s=0.0, known=known)
    (again,), _ = past_jobs(tmp_path, but=(), now_s=0.0, known=known)
    assert again is first and first.exit_code == 0
    ended(tmp_path, "job", LEFT | {"exit_code": 65})
    os.utime(file, ns=(1, file.stat().st_mtime_ns))  # the size alone tells
    (changed,), _ = past_jobs(tmp_path, but=(), now_s=0.0, known=known)
    assert changed.exit_code == 65
    file.unlink()
    assert past_jobs(tmp_path, but=(), now_s=0.0, known=known) == ([], 0) and known == {}
