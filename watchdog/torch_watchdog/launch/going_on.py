"""What a person types to go on from a checkpoint, or to begin again: the launch's own line, as it was given, with what it needs besides.

Pure: a checkpoint and the end of the job (or its record) in, lines out. It must not know incidents, files, terminals or processes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from torch_watchdog.launch.job_end import JobEnd
from torch_watchdog.launch.plan import resume_command
from torch_watchdog.phrases import as_typed

__all__ = ["again", "resume_lines", "resumed_before", "to_go_on"]

_LOADED_BY_RESTORE = "dcp"  # torch's form: no framework finds it by itself
_CALL_RESTORE = (
    "  call   torch_watchdog_agent.restore(model=..., optimizer=..., scheduler=..., loader=...) in the script: without it that line begins "
    "from nothing"
)


def to_go_on(
    checkpoint: Mapping[str, Any], record: Mapping[str, Any], run_dir: PurePath, *, here: str, quarantine: str | None, restores: bool
) -> list[str]:
    """What to type, of a job whose launch may still run; nothing where `record`, its job.json, does not name its command."""
    command = tuple(record.get("command") or ())
    end = JobEnd(
        job=run_dir.name, run_dir=str(run_dir), exit_code=0, stopped_by_us=True, ranks_reported=1, options=tuple(record.get("options") or ()),
        command=command, folder=record.get("folder") or None, here=here, quarantine=quarantine, restores=restores,
    )  # fmt: skip
    return resume_lines(checkpoint, end) if command else []


def resume_lines(checkpoint: Mapping[str, Any], end: JobEnd) -> list[str]:
    """What to type, and where that is not enough what the script must call for it, by the form that the checkpoint was written in."""
    options, path = _options(end), as_typed(checkpoint["path"], _folder(end))
    if checkpoint.get("format") != "callback":
        line = "  resume " + _to_type(resume_command(options, end.command, path), end)
        return [line] if end.restores or checkpoint.get("format") != _LOADED_BY_RESTORE else [line, _CALL_RESTORE]
    return [
        "  resume " + _to_type(("watchdog", *options, *end.command), end),
        f'  call   your own loading of {path}, then restore(model=None, loader=..., path="{path}"), in the script: nothing else resumes it',
    ]


def _options(end: JobEnd) -> tuple[str, ...]:
    """With what was left out, so that the same sample does not stop the next run, too."""
    return (*end.options, "--quarantine", as_typed(end.quarantine, _folder(end))) if end.quarantine else end.options


def _to_type(words: Sequence[str], end: JobEnd) -> str:
    """The script and the files that the command names are found from where it was typed: whoever stands elsewhere goes there first."""
    line = shlex.join(words)
    return line if _folder(end) == end.here else f"cd {shlex.quote(_folder(end))} && {line}"


def _folder(end: JobEnd) -> str:
    return end.folder or end.here


def resumed_before(end: JobEnd) -> list[str]:
    """Nothing newer than what this launch itself went on from is there."""
    if not end.resumed or not end.exit_code:
        return []
    return ["  resume " + _to_type(resume_command(_options(end), end.command, as_typed(end.resumed, _folder(end))), end)]


def again(end: JobEnd) -> str:
    """From the very beginning."""
    return "  again  " + _to_type(("watchdog", *_options(end), *end.command), end)
