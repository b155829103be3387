"""What lives on of a launch whose end nobody wrote down: asked of this machine's kernel, for whoever looks at its record.

Owns how a process is told to be of a launch. A pid alone proves nothing, so a rank is known by the ring that it has mapped, whose path names the launch's
session and the rank's own pid; any other process by the session in its environment. Never writes.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch_watchdog.launch.places import is_held
from torch_watchdog.launch.plan import AGENT_VARIABLE
from torch_watchdog.phrases import ENDED_WITHOUT_A_WORD, LIVES_AND_IS_SILENT, goes_on_elsewhere, goes_on_unwatched
from torch_watchdog.user import user_name
from torch_watchdog_proto.envelopes import JobStatus

__all__ = ["Survivors", "UnansweredStatus", "failed_ranks", "state_told", "survivors"]

_KEEPER = "torch-watchdog"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors:
    """`ranks`: the newest attempt's that live, and their pids. `words`: what is known of its end. `to_end`: whom a signal would have to reach to end it, of
    a launch that goes on unwatched: its launcher and its ranks, whose own children end with them. `failed`: ranks that had by then; the others are being
    saved, and train no more either.
    """

    state: Literal["running", "ended", "unknown"]
    words: str
    ranks: Mapping[int, int] = field(default_factory=dict)
    to_end: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.state == "ended"

    @property
    def advice(self) -> str:
        """The words, and what to type: for whoever looks now. A pid may be another process's by tomorrow, so no file holds this."""
        return f"{self.words}; `kill {' '.join(map(str, self.to_end))}` ends it" if self.to_end else self.words


@dataclass(frozen=True, slots=True, kw_only=True)
class UnansweredStatus(JobStatus):
    """Of a launch that has written no end, and whose daemon does not answer: what is known of that. `unwatched`: it was killed, and its training goes on."""

    problem: str
    unwatched: bool

    @classmethod
    def of(cls, left: Survivors, **known: Any) -> JobStatus:
        """The plain one where nothing lives on."""
        if left.has_ended:
            return JobStatus(state="ended", **known)
        return cls(state=left.state, problem=left.advice, unwatched=bool(left.to_end), **known)


def state_told(job: JobStatus) -> str:
    """In a list of jobs: in the words that `status` and the pages begin with, of a launch that has told no exit code."""
    if job.state == "ended" and job.exit_code is None:
        return ENDED_WITHOUT_A_WORD.partition(":")[0]
    return f"{job.state}, unwatched" if isinstance(job, UnansweredStatus) and job.unwatched else job.state


def survivors(record: Mapping[str, Any], proc: Path = Path("/proc"), *, events: Sequence[Mapping[str, Any]] = ()) -> Survivors:
    """Of a launch whose `record`, its job.json, tells no end, and whose daemon does not answer. `events`: what it had noted by then."""
    session = str(record.get("session") or "")
    if not re.fullmatch(r"[0-9a-f]+", session):
        return Survivors(state="ended", words=ENDED_WITHOUT_A_WORD)
    host, user = record.get("host"), record.get("user")
    if host != socket.gethostname() or (user or user_name()) != user_name():
        return Survivors(state="unknown", words=goes_on_elsewhere(str(host), str(user or "")))
    pids = list(_of_session(session, proc))
    rings = [ring for pid in pids if (ring := _ring(pid, session, proc)) is not None]
    newest = max((attempt for attempt, _, _ in rings), default=0)
    ranks = {rank: pid for attempt, rank, pid in sorted(rings) if attempt == newest}
    if is_held(session, os.environ):
        return Survivors(state="running", words=LIVES_AND_IS_SILENT, ranks=ranks)
    living = tuple(ranks.values()) or tuple(pids)
    if not living:
        return Survivors(state="ended", words=ENDED_WITHOUT_A_WORD)
    failed = sorted(failed_ranks(events, attempt=newest if rings else None))
    words = goes_on_unwatched(living, are_ranks=bool(ranks), failed=failed)
    to_end = tuple(pid for pid in pids if not _is_below(pid, ranks.values(), proc))
    return Survivors(state="running", words=words, ranks=ranks, to_end=to_end, failed=tuple(failed))


def failed_ranks(events: Sequence[Mapping[str, Any]], *, attempt: int | None = None) -> dict[int, str]:
    """Of that attempt, else the newest: by their own word, or as their ends were seen; and what of."""
    if attempt is None:
        attempt = max((int(event.get("attempt") or 0) for event in events), default=0)
    failed: dict[int, str] = {}
    for event in events:
        kind, rank = event.get("kind"), event.get("rank")
        if event.get("attempt") != attempt or not isinstance(rank, int):
            continue
        if kind == "rank.failed":
            failed[rank] = f"rank {rank}, step {event.get('step')}: {event.get('text')}"
        elif kind == "rank.exited" and (event.get("signal") or event.get("exit_code")):
            failed.setdefault(rank, str(event.get("text")))
    return failed


def _of_session(session: str, proc: Path) -> Iterator[int]:
    """Processes that were started under it, without its keepers: those end by themselves."""
    name, wanted = f"{AGENT_VARIABLE}=".encode(), f'"session":"{session}"'.encode()
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(OSError):  # gone meanwhile, or another user's
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any(one.startswith(name) and wanted in one for one in variables) and (folder / "comm").read_text().strip() != _KEEPER:
                yield int(folder.name)


def _is_below(pid: int, ranks: Collection[int], proc: Path) -> bool:
    """A rank's child, or a child's: a worker of its loader, the tracker of its semaphores."""
    with suppress(OSError, ValueError):
        while pid > 1:
            pid = int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            if pid in ranks:
                return True
    return False


def _ring(pid: int, session: str, proc: Path) -> tuple[int, int, int] | None:
    """(attempt, rank, pid) of a rank; None of a process that is none, or a child of one."""
    with suppress(OSError):
        found = re.search(rf"/{session}/(\d+)-(\d+)-{pid}\.ring", (proc / str(pid) / "maps").read_text(errors="replace"))
        return None if found is None else (int(found[1]), int(found[2]), pid)
    return None
