"""What a launch said at its end, said again for a person who stands elsewhere by now, perhaps on a page.

Owns no words: they are the launch's own (launch/summary.py). Looks at the run directory for the samples that were left out, for a checkpoint that
ranks have sealed when nobody was left to write it into the record, and for those that nobody was left to finish.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from torch_watchdog.launch.job_end import end_of
from torch_watchdog.launch.summary import left_by_ranks, left_unfinished, summarise
from torch_watchdog.launch.survivors import failed_ranks
from torch_watchdog.phrases import as_typed, one_line, shortened, unjudged
from torch_watchdog.store.checkpoints import newest_checkpoint, unfinished_checkpoints
from torch_watchdog.store.read import read_events
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog_agent.asked import TAKEN

__all__ = ["last_words"]

_MOST = 4  # ranks that are told of


def last_words(
    directory: RunDirectory, record: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]], *, here: str, is_dead: bool = False
) -> list[str]:
    """With the line that resumes it from the folder `here`, from anywhere where that is empty. Nothing where the launch has not ended, or `record`, its
    job.json, lies on another machine and is empty. `is_dead`: the launch was killed before it could write how it ended.
    """
    if record.get("policy") == "scan":  # as scan/record.py tells it: what the launch beneath it has to say is not what the scan found
        return [] if record.get("exit_code") is None else [str(record["exit_reason"])]
    root, quarantine = directory.root, str(directory.quarantine_file) if directory.quarantine_file.exists() else None
    unfinished = unfinished_checkpoints(root / "checkpoints", now_s=time.time())
    end = end_of(record, root, here=here, quarantine=quarantine, unfinished=unfinished)
    if end is None and not is_dead:
        return []
    lines = summarise(incidents, end) if end is not None else _of_the_dead(directory, incidents, unfinished, here)
    if end is not None and end.exit_code == 0 and not end.stopped_by_us:
        return lines  # it came to its own end: nobody is to go on from there
    left = newest_checkpoint(root / "checkpoints")
    if left is None or (end is not None and PurePath(left["path"]).name in _named(incidents)):
        return lines
    return left_by_ranks(left, lines, record, root, here=here, quarantine=quarantine, restores=(root / TAKEN).exists())


def _of_the_dead(directory: RunDirectory, incidents: Sequence[Mapping[str, Any]], unfinished: Sequence[str], here: str) -> list[str]:
    """Of a launch that was killed before it could say a last word: why and how to mend it, or ranks that had failed and were not judged by then."""
    events = read_events(directory.root)
    attempt = max((int(event.get("attempt") or 0) for event in events), default=0)
    judged = next((found for found in incidents if found.get("severity") == "critical" and found.get("attempt") == attempt), None)
    note = [f"  note   {left_unfinished(unfinished, here)}"] if unfinished else []
    if judged is not None:
        told = (("why", judged.get("cause")), ("fix", judged.get("fix")))
        return [*(f"  {label:<6} {one_line(shortened(str(text), here))}" for label, text in told if text), *note]
    failed = failed_ranks(events, attempt=attempt)
    if not failed and any(directory.logs.glob("rank-*.log")):
        note.insert(0, f"  note   nobody watched its end: what its ranks have printed is in {as_typed(str(directory.logs), here)}")
    return [*unjudged(list(failed.values())[:_MOST]), *note]


def _named(incidents: Sequence[Mapping[str, Any]]) -> set[str]:
    """The good checkpoints that the record knows of, by their folders: the run directory may have been moved since."""
    made = [(incident.get("action") or {}).get("checkpoint") or {} for incident in incidents]
    return {PurePath(str(checkpoint.get("path"))).name for checkpoint in made if checkpoint.get("committed")}
