"""A job as a Chrome trace (JSON), which Perfetto and chrome://tracing open: nodes as processes, ranks as threads, steps and phases as slices.

Owns the format and its bound: a long run of many ranks is thinned to MAX_EVENTS, the steps of incidents kept, and the trace says so itself. Pure:
a history in, events out. Times are microseconds since the job's first event, as the format wants them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from torch_watchdog.phrases import one_line, who
from torch_watchdog.report.counting import told
from torch_watchdog.report.history import JobHistory
from torch_watchdog.report.steps import Batch, RankTrack, json_number

__all__ = ["MAX_EVENTS", "Thinning", "thinning", "trace_events", "trace_metadata"]

MAX_EVENTS = 400_000  # some 60 MB: both viewers still open it
MAX_VICTIMS = 256  # of one incident: arrows beyond that are a hairball
MAX_ARROWS = 4_096  # of all incidents
MAX_INCIDENTS = 1_000
_INSTANT_US = 1_000.0
Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinning:
    """Every `stride`-th step is told, with its phases or without; steps that an incident names always are: of all ranks, or of the one that it began at."""

    stride: int
    phases: bool
    named_of_all: bool = True

    @property
    def words(self) -> str:
        if self.stride == 1 and self.phases:
            return "every step with its phases"
        return f"every {self.stride}. step" if self.stride > 1 else "every step, without its phases"


def thinning(history: JobHistory, max_events: int = MAX_EVENTS) -> Thinning:
    """The most that fits."""
    steps = sum(len(track.time_ns) for track in history.tracks)
    phases = 3 * sum(len(track.batches) for track in history.tracks)
    counters = 3 * steps + 3 * sum(len(gpu.samples) for gpu in history.gpus.values())
    if steps + counters + phases <= max_events:
        return Thinning(stride=1, phases=True)
    named = 7 * len(history.ranks) * len({_named_step(found) for found in history.incidents})
    stride = max(1, math.ceil((steps + counters) / max_events))
    return Thinning(stride=stride, phases=False, named_of_all=named <= max_events // 4)


def trace_metadata(history: JobHistory, kept: Thinning) -> dict[str, Any]:
    """Beside the events: where they come from, and what is left out."""
    return {
        "job": history.name,
        "epoch_ns": _epoch_ns(history),
        "steps": told(history.tracks),
        "kept": kept.words,
        "made_by": "torch-watchdog",
    }


def trace_events(history: JobHistory, kept: Thinning) -> Iterator[Event]:
    """Names of the tracks first, then each rank's slices in order, then GPUs, incidents and their arrows."""
    places = _Places(history)
    yield from places.names()
    incidents = history.incidents[:MAX_INCIDENTS]
    for track in history.tracks:
        named = {
            step
            for found in incidents
            for attempt, step in (_named_step(found),)
            if attempt == track.attempt and step is not None and (kept.named_of_all or _origin(found) == track.rank)
        }
        yield from _steps(track, places, kept, named)
    yield from _gpus(history, places, kept)
    for found in incidents:
        yield from _incident(found, places, min(MAX_VICTIMS, MAX_ARROWS // len(incidents)))


def _named_step(found: Mapping[str, Any]) -> tuple[int, int | None]:
    return found.get("attempt", 0), found.get("step")


def _origin(found: Mapping[str, Any]) -> int | None:
    return (found.get("origin") or {}).get("rank")


def _epoch_ns(history: JobHistory) -> int:
    """The first moment that anything is known of."""
    times = [batch.time_ns - batch.loader_ns for track in history.tracks for batch in track.batches.values()]
    times += [time - track.duration_ns.get(step, 0) for track in history.tracks for step, time in track.time_ns.items()]
    times += [gpu.samples[0].time_ns for gpu in history.gpus.values() if gpu.samples]
    times += [time for found in history.incidents if (time := _time_ns(found)) is not None]
    return min(times, default=0)


def _time_ns(found: Mapping[str, Any]) -> int | None:
    try:
        return round(datetime.fromisoformat(str(found.get("time"))).timestamp() * 1e9)
    except ValueError:
        return None


class _Places:
    """Which process and thread of the trace a rank is, and where its time begins."""

    def __init__(self, history: JobHistory) -> None:
        self._history = history
        self.epoch_ns = _epoch_ns(history)
        keys = sorted({(track.attempt, history.node_of.get((track.attempt, track.rank), "")) for track in history.tracks})
        self._processes = {key: number for number, key in enumerate(keys, start=1)}

    def us(self, time_ns: int) -> float:
        return round((time_ns - self.epoch_ns) / 1000, 3)

    def of(self, attempt: int, rank: int) -> dict[str, int]:
        node = self._history.node_of.get((attempt, rank), "")
        return {"pid": self._processes.get((attempt, node), 0), "tid": rank + 1}  # 0 is no thread to the viewers

    def of_node(self, node: str) -> int:
        return next((number for (_, name), number in reversed(self._processes.items()) if name == node), 0)

    def knows(self, attempt: int, rank: int) -> bool:
        return (attempt, self._history.node_of.get((attempt, rank), "")) in self._processes

    def names(self) -> Iterator[Event]:
        several = len({attempt for attempt, _ in self._processes}) > 1
        yield _name("process_name", 0, 0, f"job {self._history.name}")
        for (attempt, node), number in self._processes.items():
            yield _name("process_name", number, 0, f"node {node or '?'}" + (f", attempt {attempt}" if several else ""))
        for track in self._history.tracks:
            place = self.of(track.attempt, track.rank)
            yield _name("thread_name", place["pid"], place["tid"], f"rank {track.rank}")
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": track.rank}}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": one_line(name)}}


def _steps(track: RankTrack, places: _Places, kept: Thinning, named: set[int]) -> Iterator[Event]:
    place = places.of(track.attempt, track.rank)
    before, batches = track.updates_before, dict[int, list[Batch]]()
    for (step, _), batch in sorted(track.batches.items()):
        batches.setdefault(step, []).append(batch)
    for step in track.steps:
        if step % kept.stride and step not in named:
            continue
        end_ns = track.time_ns[step]
        begin_ns = end_ns - track.duration_ns.get(step, 0)
        arguments = {
            "step": step,
            "updates_before": before.get(step),
            "loss": json_number(track.loss.get(step)),
            "vetoed": step in track.vetoed,
        }
        name = f"step {step}, no update" if step in track.vetoed else f"step {step}"
        yield _slice(name, "step", place, places.us(begin_ns), places.us(end_ns), arguments)
        if kept.phases or step in named:
            update_ns = 0 if track.gpu else track.update_ns.get(step, 0)  # of a GPU the loop's own time says nothing
            yield from _phases(batches.get(step, []), begin_ns, end_ns - update_ns, place, places)
            if update_ns:
                yield _slice("update", "phase", place, places.us(end_ns - update_ns), places.us(end_ns), {})
        yield from _counters(track, step, place, places.us(end_ns))


def _slice(name: str, category: str, place: Mapping[str, int], begin_us: float, end_us: float, arguments: Mapping[str, Any]) -> Event:
    length = round(max(0.0, end_us - begin_us), 3)
    return {"ph": "X", "name": name, "cat": category, **place, "ts": begin_us, "dur": length, "args": dict(arguments)}


def _phases(batches: list[Batch], begin_ns: int, end_ns: int, place: Mapping[str, int], places: _Places) -> Iterator[Event]:
    """Inside the step's slice, before its update: waiting for the loader, forward, and the rest of the batch's time (backward, waiting for other ranks)."""
    for number, batch in enumerate(batches):
        later = batches[number + 1] if number + 1 < len(batches) else None
        next_ns = end_ns if later is None else later.time_ns - later.loader_ns
        cuts = [batch.time_ns - batch.loader_ns, batch.time_ns, batch.time_ns + batch.forward_ns, next_ns]
        bounds = [min(max(cut, begin_ns), end_ns) for cut in cuts]
        names = ("load", "evaluation" if batch.evaluation else "forward", "backward and waiting")
        if not batch.forward_ns:  # one slice for what cannot be told apart
            bounds, names = [*bounds[:2], bounds[3]], ("load", "evaluation" if batch.evaluation else "forward and backward")  # type: ignore[assignment]
        for name, first, last in zip(names, bounds, bounds[1:], strict=False):
            if last > first:
                yield _slice(name, "phase", place, places.us(first), places.us(last), {"micro_step": number})


def _counters(track: RankTrack, step: int, place: Mapping[str, int], time_us: float) -> Iterator[Event]:
    values = {"loss": track.loss.get(step), "gradient norm": track.grad_norm.get(step), "memory, MiB": _mib(track.peak_bytes.get(step))}
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            yield _counter(f"{name}, rank {track.rank}", place["pid"], time_us, value)


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else round(size_bytes / 2**20, 1)


def _counter(name: str, pid: int, time_us: float, value: float) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": time_us, "args": {"value": value}}


def _gpus(history: JobHistory, places: _Places, kept: Thinning) -> Iterator[Event]:
    for gpu in history.gpus.values():
        pid = places.of_node(gpu.node)
        for sample in gpu.samples[:: kept.stride]:
            figures = {"memory, MiB": _mib(sample.memory_used_bytes), "power, W": sample.power_w, "temperature, C": sample.temperature_c}
            for name, value in figures.items():
                if value is not None:
                    yield _counter(f"GPU {sample.index} {name}", pid, places.us(sample.time_ns), value)


def _incident(found: Mapping[str, Any], places: _Places, max_victims: int) -> Iterator[Event]:
    """An instant, a slice to hang arrows on, and an arrow to each rank that it reached."""
    time_ns, attempt = _time_ns(found), found.get("attempt", 0)
    rank = _origin(found)
    if time_ns is None:
        return
    begin_us, kind = places.us(time_ns), one_line(str(found.get("kind", "?")))
    arguments = {name: one_line(str(found.get(name, ""))) for name in ("id", "severity", "summary", "cause", "fix")}
    arguments["who"] = one_line(who(found))
    if rank is None or not places.knows(attempt, rank):
        yield {"ph": "i", "s": "g", "name": kind, "cat": "incident", "pid": 0, "tid": 0, "ts": begin_us, "args": arguments}
        return
    place = places.of(attempt, rank)
    yield {"ph": "i", "s": "t", "name": kind, "cat": "incident", **place, "ts": begin_us, "args": arguments}
    seconds = (found.get("action") or {}).get("seconds_to_stop")
    yield _slice(kind, "incident", place, begin_us, begin_us + max(_INSTANT_US, (seconds or 0) * 1e6), arguments)
    for victim in (found.get("ranks_affected") or ())[:max_victims]:
        if places.knows(attempt, victim):
            yield from _arrow(f"{attempt}.{found.get('id')}.{victim}", kind, rank, place, places.of(attempt, victim), begin_us)


def _arrow(name: str, kind: str, rank: int, origin: Mapping[str, int], victim: Mapping[str, int], time_us: float) -> Iterator[Event]:
    yield _slice(f"reached by {kind} of rank {rank}", "incident", victim, time_us, time_us + _INSTANT_US, {})
    arrow = {"name": kind, "cat": "incident", "id": name}
    yield {"ph": "s", **arrow, **origin, "ts": time_us, "args": {}}
    yield {"ph": "f", "bp": "e", **arrow, **victim, "ts": round(time_us + _INSTANT_US / 2, 3), "args": {}}
