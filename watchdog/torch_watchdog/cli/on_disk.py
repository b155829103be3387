"""The status of a job by its run directory, where no daemon answers for it.

Pure, but for a look at what lives on of a launch that has written no end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_watchdog.launch.survivors import UnansweredStatus, survivors
from torch_watchdog.report.steps import RankTrack
from torch_watchdog.store.read import epoch_s, read_events
from torch_watchdog_proto.envelopes import JobStatus, RankStatus, ShownPhase

__all__ = ["status_on_disk"]


def status_on_disk(root: Path, record: Mapping[str, Any], found: Sequence[RankTrack], *, num_incidents: int) -> JobStatus:
    """A job that nobody answers for has ended, unless something of it is seen to live on, or cannot be seen from here."""
    newest = max((track.attempt for track in found), default=int((record.get("end") or {}).get("attempt") or 0))
    left = survivors(record, events=read_events(root)) if record.get("exit_code") is None else None
    phase: ShownPhase = "end" if left is not None and left.failed else "train"
    pids = left.ranks if left is not None else {}
    reported = tuple(_rank_status(track, record, pids.get(track.rank), phase) for track in found if track.attempt == newest)
    known: dict[str, Any] = {
        "job": root.name,
        "policy": record.get("policy", "stop"),
        "attempt": newest,
        "world_size": record.get("world_size") or len({track.rank for track in found} | pids.keys()),
        "run_dir": str(root),
        "started_s": epoch_s(record.get("started")),
        "nodes": (str(record.get("host", "")),),
        "incidents": num_incidents,
        "lost_records": sum(track.lost_records for track in found),
        "exit_code": record.get("exit_code"),
        "ranks": (
            *reported,
            *(_silent_rank(rank, record, pids[rank], phase) for rank in sorted(pids.keys() - {one.rank for one in reported})),
        ),
    }
    return JobStatus(state="ended", **known) if left is None else UnansweredStatus.of(left, **known)


def _silent_rank(rank: int, record: Mapping[str, Any], pid: int, phase: ShownPhase) -> RankStatus:
    """One that lives, and whose launch was killed before its first report."""
    return RankStatus(rank=rank, node=str(record.get("host", "")), pid=pid, phase=phase, alive=True)


def _rank_status(track: RankTrack, record: Mapping[str, Any], pid: int | None, phase: ShownPhase) -> RankStatus:
    """`pid`: its process lives, unwatched and in that phase."""
    steps = track.steps
    return RankStatus(
        rank=track.rank,
        node=str(record.get("host", "")),
        pid=pid or 0,
        phase="end" if pid is None else phase,
        alive=pid is not None,
        last_step=steps[-1] if steps else None,
        loss=track.loss[max(track.loss)] if track.loss else None,
        step_time_s=track.median_step_s,
        last_seen_s=track.time_ns[steps[-1]] / 1e9 if steps else None,
        updates_applied=track.updates.get(steps[-1]) if steps else None,
        began_at_update=track.began_at_update,
    )
