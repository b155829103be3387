"""A job that ended before this daemon began: what its run directory holds of it, to look at."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from torch_watchdog.launch.record import resumed_from
from torch_watchdog.phrases import ENDED_WITHOUT_A_WORD, steps_told
from torch_watchdog.report.last_words import last_words
from torch_watchdog.report.story import clock
from torch_watchdog.scan.tell import COLUMNS, row
from torch_watchdog.store.past import PastJob
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog.web.pages.shown import render

__all__ = ["page"]

_SHOWN_RANKS = 256
_SHOWN_SAMPLES = 50


async def page(request: Request, job: PastJob) -> Response:
    ranks = job.status.ranks
    steps = steps_told(
        max((rank.last_step + 1 for rank in ranks if rank.last_step is not None), default=0),
        began=next((rank.began_at_update for rank in ranks if rank.began_at_update is not None), None),
        updates=max((rank.updates_applied for rank in ranks if rank.updates_applied is not None), default=None),
    )
    left, code = job.left, job.status.exit_code
    facts: dict[str, Any] = {
        "state": left.advice if left is not None else ENDED_WITHOUT_A_WORD if code is None else f"ended, exit code {code}",
        "how": job.record.get("exit_reason"), "began": clock(job.record.get("started")), "ended": clock(job.record.get("ended")),
        "resumed from": resumed_from(job.record),
        "ranks": job.status.world_size, "trained": steps, "policy": job.status.policy, "attempt": job.status.attempt or None,
        "incidents": job.status.incidents, "files": job.run_dir,
    }  # fmt: skip
    words = await request.app.state.view.disk.read(lambda: last_words(RunDirectory(job.run_dir), job.record, job.incidents, here=""))
    return render(
        request, "past.html", job=job.status.job, facts={name: value for name, value in facts.items() if value not in (None, "")},
        incidents=list(job.incidents)[::-1][:50], ranks=ranks[:_SHOWN_RANKS], more_ranks=max(0, len(ranks) - _SHOWN_RANKS), words=words,
        bad=None if job.bad_samples is None else [row(sample) for sample in job.bad_samples[:_SHOWN_SAMPLES]], columns=COLUMNS,
        has_ended=left is None or left.has_ended,
    )  # fmt: skip
