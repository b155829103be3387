"""What a job's page asks for while it is open: the map's cells, and a stream of the newest figures (server-sent events).

Owns the maps of the daemon's jobs. However many pages are open, a job is summed up once a second.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from torch_watchdog.daemon.view import FleetView
from torch_watchdog.errors import UnknownJobError
from torch_watchdog.web.heat import METRICS, HeatMap
from torch_watchdog_proto.envelopes import JobStatus
from torch_watchdog_proto.messages import NodeReport

__all__ = ["Heat", "heat", "stream"]

_MAX_STREAMS = 64
_MAX_MAPS = 32
_PERIOD_S = 1.0
_LONGEST_S = 3600.0  # a browser comes again by itself


class Heat:
    """A map a job, filled as reports come; the oldest gives way."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._clock: Callable[[], float] = view.clock
        self._maps: dict[str, HeatMap] = {}
        self._summaries: dict[str, tuple[float, dict[str, Any]]] = {}
        self.num_streams = 0
        self.reading = asyncio.Semaphore(2)  # segments are megabytes: pages wait for one another rather than fill the memory
        view.ingest.observers.append(self.observe)

    def observe(self, job: str, node: str, report: NodeReport) -> None:
        now_s = self._clock()
        if job not in self._maps:
            while len(self._maps) >= _MAX_MAPS:
                self._maps.pop(next(iter(self._maps)))
            self._maps[job] = HeatMap(now_s)
        self._maps[job].add(node, report, now_s)

    def map_of(self, job: str) -> HeatMap:
        """An empty one where nothing has been reported. Raises UnknownJobError."""
        self._view.run_dir(job)
        return self._maps.get(job) or HeatMap(self._clock())

    def until_s(self, job: str) -> float:
        """Where its map ends: now, or where the job did. Raises UnknownJobError."""
        return self.map_of(job).newest_s if self.summary(job)["state"] == "ended" else self._clock()

    def summary(self, job: str) -> dict[str, Any]:
        """At most a second old."""
        now_s = self._clock()
        made_s, known = self._summaries.get(job, (0.0, {}))
        if now_s - made_s >= _PERIOD_S:
            known = _summary(self._view.job(job))
            while len(self._summaries) >= _MAX_MAPS:
                self._summaries.pop(next(iter(self._summaries)))
            self._summaries[job] = (now_s, known)
        return known


def _summary(status: JobStatus) -> dict[str, Any]:
    steps = [rank.last_step for rank in status.ranks if rank.last_step is not None]
    times = [rank.step_time_s for rank in status.ranks if rank.step_time_s]
    return {
        "state": status.state, "exit_code": status.exit_code, "incidents": status.incidents, "ranks": len(status.ranks),
        "alive": sum(rank.alive for rank in status.ranks), "first_step": min(steps, default=None), "last_step": max(steps, default=None),
        "updates": max((rank.updates_applied for rank in status.ranks if rank.updates_applied is not None), default=None),
        "slowest_s": max(times, default=None), "fastest_s": min(times, default=None), "standstill": status.standstill,
    }  # fmt: skip


async def heat(request: Request) -> Response:
    """`metric`, `first` and `last` rank by query."""
    metric = request.query_params.get("metric", "step")
    first, last = (_number(request.query_params.get(name, ""), default) for name, default in (("first", 0), ("last", 1 << 30)))
    if metric not in METRICS or first is None or last is None:
        return JSONResponse({"error": f"`metric` is one of {', '.join(METRICS)}; `first` and `last` are ranks"}, status_code=400)
    maps: Heat = request.app.state.heat
    job = request.path_params["job"]
    try:
        window = maps.map_of(job).window(metric, first, last, maps.until_s(job))
    except UnknownJobError as error:
        return JSONResponse({"error": str(error)}, status_code=404)
    return JSONResponse(await asyncio.to_thread(window.to_json))


def _number(text: str, default: int) -> int | None:
    if not text:
        return default
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


async def stream(request: Request) -> Response:
    maps: Heat = request.app.state.heat
    job = request.path_params["job"]
    try:
        maps.summary(job)
    except UnknownJobError as error:
        return JSONResponse({"error": str(error)}, status_code=404)
    if maps.num_streams >= _MAX_STREAMS:
        return JSONResponse({"error": f"{_MAX_STREAMS} pages are being followed already"}, status_code=503)
    return StreamingResponse(_events(maps, job), media_type="text/event-stream")


async def _events(maps: Heat, job: str) -> AsyncIterator[str]:
    """What is new, once a second at most; a comment now and then, so that a page that is gone is noticed."""
    maps.num_streams += 1
    told: dict[str, Any] = {}
    try:
        for _ in range(int(_LONGEST_S / _PERIOD_S)):
            summary = maps.summary(job)
            yield ": still here\n\n" if summary == told else f"data: {json.dumps(summary)}\n\n"
            told = summary
            await asyncio.sleep(_PERIOD_S)
    except UnknownJobError:
        return  # the daemon has forgotten the job meanwhile
    finally:
        maps.num_streams -= 1
