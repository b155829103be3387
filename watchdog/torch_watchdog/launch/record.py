"""What job.json says: written when a launch starts, and again when it has ended.

Pure: facts in, a JSON object out. Environment variables are listed by name only, because their values hold people's secrets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any

from torch_watchdog.launch.job_end import END_FIELDS, JobEnd
from torch_watchdog.store.shapes import NEWEST_JOB_VERSION

__all__ = ["JobStart", "at_end", "at_start", "resumed_from"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """`daemon` is where a live job answers on its own machine, `network` where it does from others;
    `session` tells whether what answers there is this launch; `folder` is where the command was typed; `slurm_job_id` is None outside of Slurm.
    """

    job: str
    session: str
    command: tuple[str, ...]
    options: tuple[str, ...]
    policy: str
    daemon: str
    network: str | None
    host: str
    user: str
    pid: int
    versions: Mapping[str, str]
    resume: str | None
    started: datetime
    folder: str
    slurm_job_id: str | None = None


def at_start(start: JobStart, environment_names: Sequence[str]) -> dict[str, Any]:
    """job.json of a launch that begins: what is known only at its end is null."""
    return {
        "schema_version": NEWEST_JOB_VERSION,
        "job": start.job,
        "session": start.session,
        "command": list(start.command),
        "folder": start.folder,
        "options": list(start.options),
        "policy": start.policy,
        "daemon": start.daemon,
        "network": start.network,
        "host": start.host,
        "user": start.user,
        "pid": start.pid,
        "versions": dict(start.versions),
        "resume": start.resume,
        "started": _utc(start.started),
        "ended": None,
        "exit_code": None,
        "exit_reason": None,
        "world_size": None,
        "ranks_reported": None,
        "end": None,
        "scheduler": None if start.slurm_job_id is None else {"slurm_job_id": start.slurm_job_id},
        "environment": sorted(environment_names),
    }


def resumed_from(record: Mapping[str, Any]) -> str:
    """`demo at step 23`, or the checkpoint's path where that lies in no run directory; "" where the launch resumed none."""
    resume = record.get("resume")
    if not resume or (record.get("end") or {}).get("unused_resume"):
        return ""
    path = PurePath(str(resume))
    step = re.fullmatch(r"step-(\d+)", path.name)
    return f"{path.parent.parent.name} at step {step[1]}" if step and path.parent.name == "checkpoints" else str(path)


def at_end(record: Mapping[str, Any], end: JobEnd, *, ended: datetime, exit_reason: str, world_size: int) -> dict[str, Any]:
    """`end` holds what only this launch's last words need, so that `watchdog status` can say them again."""
    return {
        **record,
        "ended": _utc(ended),
        "exit_code": end.exit_code,
        "exit_reason": exit_reason,
        "world_size": world_size or None,
        "ranks_reported": end.ranks_reported,
        "end": {name: getattr(end, name) for name in END_FIELDS},
    }


def _utc(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
