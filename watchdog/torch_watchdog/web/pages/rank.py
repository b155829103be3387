"""One rank: its newest steps as curves and a table, and one of them with what its batch was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from torch_watchdog.report import svg
from torch_watchdog.report.counting import updates_beside
from torch_watchdog.report.history import history_of
from torch_watchdog.report.steps import RankTrack
from torch_watchdog.report.steps import as_json as track_as_json
from torch_watchdog.report.strip import cells_of
from torch_watchdog.web.pages.shown import answering, not_found, render
from torch_watchdog_proto.messages import NodeReport, StepBlock, StepTable

__all__ = ["page"]

_TABLE_STEPS = 50
_CURVE_STEPS = 2_000
_CELLS = 100


@answering
async def page(request: Request) -> Response:
    view, job, rank = request.app.state.view, request.path_params["job"], request.path_params["rank"]
    past = None if view.is_live(job) else await view.past_job(job)
    of_job, run_dir = (view.job(job), view.run_dir(job)) if past is None else (past.status, past.run_dir)
    incidents = list(view.incidents(job) if past is None else past.incidents)
    status = next((one for one in of_job.ranks if one.rank == rank), None)
    if status is None:
        return not_found(request, f"Job {job} has no rank {rank} that has reported.")
    async with request.app.state.heat.reading:
        blocks = await view.newest_blocks(run_dir, rank)
    shown = await asyncio.to_thread(_shown, blocks, incidents)
    wanted = request.query_params.get("step", "")
    step = int(wanted) if wanted.isascii() and wanted.isdecimal() and len(wanted) < 16 else None
    batch = [] if step is None else list(_tensors(blocks, step))
    return render(request, "rank.html", job=job, rank=status, step=step, batch=batch, **shown)


def _shown(blocks: Sequence[StepBlock], incidents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the newest attempt."""
    history = history_of("", {}, [("", "", NodeReport(seq=0, time_ns=0, steps=StepTable.of(blocks)))])
    if not history.tracks or not history.tracks[-1].steps:
        return {"strip": None, "charts": [], "steps": []}
    track = history.tracks[-1]
    steps = track.steps[-_CURVE_STEPS:]
    cells = cells_of(track, steps[0], steps[-1], incidents, _CELLS)
    updates = updates_beside([track], steps[0], steps[-1])
    strip = svg.strips([(f"rank {track.rank}", cells)], steps[0], steps[-1], label=f"steps {steps[0]} to {steps[-1]}", updates=updates)
    return {"strip": Markup(strip), "charts": _charts(track, steps, updates), "steps": _table(track)}  # noqa: S704 - svg.py escapes


def _charts(track: RankTrack, steps: Sequence[int], updates: svg.Updates) -> list[tuple[str, Markup]]:
    loss = {float(step): [track.loss[step]] for step in steps if step in track.loss}
    times = {float(step): [track.duration_ns[step] / 1e6] for step in steps if step in track.duration_ns}
    drawn = (
        ("Loss", svg.curve(loss, label="loss", unit="", updates=updates)),
        ("Step time, on a logarithmic scale", svg.curve(times, label="step time", unit="ms", logarithmic=True, updates=updates)),
    )
    return [(title, Markup(text)) for title, text in drawn if text]  # noqa: S704 - svg.py escapes


def _table(track: RankTrack) -> list[dict[str, Any]]:
    """Newest first."""
    columns = track_as_json(track)
    names = ("step", "updates_before", "step_s", "loader_s", "forward_s", "loss", "vetoed")
    rows = zip(*(columns[name][-_TABLE_STEPS:] for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows][::-1]


def _tensors(blocks: Sequence[StepBlock], step: int) -> Iterator[dict[str, Any]]:
    """What the guard saw of the step's batches."""
    for block in blocks:
        for tensor in block.tensors:
            for place, row in enumerate(tensor.rows):
                if row < len(block.micro_of_step) and block.micro_of_step[row] == step:
                    yield {
                        "micro_step": block.micro_step[row], "key": tensor.key, "dtype": tensor.dtype, "shape": list(tensor.shapes[place]),
                        "low": _number(tensor.low[place]), "high": _number(tensor.high[place]), "finite": tensor.finite[place],
                    }  # fmt: skip


def _number(value: float) -> str:
    """Ids as they are written in data, not as the record keeps them."""
    return str(int(value)) if value.is_integer() else f"{value:.6g}"
