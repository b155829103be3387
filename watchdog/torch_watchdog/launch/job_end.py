"""How a launch ended, as facts: what its last words are made of, and what job.json keeps of it under `end`.

Pure. It must not know the words, nor files, terminals or processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

__all__ = ["END_FIELDS", "JobEnd", "end_of"]

# Of a JobEnd, under `end` in job.json.
END_FIELDS = (
    "stopped_by_us",
    "ranks_expected",
    "steps",
    "began_at_update",
    "updates",
    "attempt",
    "told",
    "unjudged",
    "unused_resume",
    "restores",
    "signalled",
    "standstill",
    "left_behind",
    "replays",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a launch ended. `options` are ours as they were given, before the wrapped `command`, in `folder`; a person stands in `here`,
    below which paths are relative.
    """

    job: str
    run_dir: str
    exit_code: int
    stopped_by_us: bool
    ranks_reported: int
    ranks_expected: int | None = None
    steps: int | None = 0  # None where the daemon did not show them to this launch's token
    began_at_update: int | None = None  # what the checkpoint held that was resumed; both None where nobody recorded it
    updates: int | None = None
    attempt: int = 0  # the newest one: the launcher has started the ranks so often again
    told: bool = True  # False where the daemon did not answer at the end: what it found is not known
    unjudged: tuple[str, ...] = ()  # and what the ranks of this node had said or come to
    options: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    here: str = "/"
    folder: str | None = None  # None: here
    resumed: str | None = None  # the checkpoint of --resume, where the ranks took it
    unused_resume: str | None = None  # and where none did
    restores: bool = True  # False where the script has not called restore()
    signalled: str = ""  # the signal from outside that asked for the end
    standstill: str = ""  # who was late when it ended, and since when
    left_behind: tuple[int, ...] = ()  # pids of this node's ranks that live on: the command was killed
    replays: str = ""  # of a replay: whose batch it is, and which samples
    recorded_by: str | None = None  # the node that has the job's record, where it is not this one
    quarantine: str | None = None  # the file of left out samples, where there are any
    unfinished: tuple[str, ...] = ()  # checkpoints whose writers were killed
    sealed: Mapping[str, Any] | None = None  # a checkpoint that the ranks have sealed themselves, because the daemon was gone


def end_of(
    record: Mapping[str, Any], run_dir: PurePath, *, here: str, quarantine: str | None, unfinished: tuple[str, ...] = ()
) -> JobEnd | None:
    """The end as job.json tells it; None where the launch has not ended, or its launcher died before it could write how."""
    end, exit_code = record.get("end"), record.get("exit_code")
    if not isinstance(end, Mapping) or exit_code is None:
        return None
    told = {name: end[name] for name in END_FIELDS if name in end}  # a newer version may have written more
    return JobEnd(
        job=run_dir.name,
        run_dir=str(run_dir),
        exit_code=exit_code,
        stopped_by_us=bool(told.pop("stopped_by_us", False)),
        left_behind=tuple(told.pop("left_behind", ())),
        unjudged=tuple(told.pop("unjudged", ())),
        ranks_reported=record.get("ranks_reported") or 0,
        options=tuple(record.get("options") or ()),
        command=tuple(record.get("command") or ()),
        folder=record.get("folder") or None,
        here=here,
        quarantine=quarantine,
        unfinished=unfinished,
        resumed=None if told.get("unused_resume") else record.get("resume") or None,
        **told,
    )
