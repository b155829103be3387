"""What a launch said at its end, said again for a person who stands elsewhere by now, perhaps on a page.

Owns no words: they are the launch's own (launch/summary.py). Looks at the run directory for the samples that were left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_watchdog.launch.summary import end_of, summarise
from torch_watchdog.store.run_directory import RunDirectory

__all__ = ["last_words"]


def last_words(directory: RunDirectory, record: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]], *, here: str) -> list[str]:
    """With the line that resumes it from the folder `here`, from anywhere where that is empty. Nothing where the launch has not ended, or `record`, its
    job.json, lies on another machine and is empty.
    """
    quarantine = directory.quarantine_file
    end = end_of(record, directory.root, here=here, quarantine=str(quarantine) if quarantine.exists() else None)
    return [] if end is None else summarise(incidents, end)
