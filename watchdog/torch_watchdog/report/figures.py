"""Figures of ranks, GPUs and versions, for pages, Markdown and JSON alike.

Pure: a history in, plain values out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from torch_watchdog.report.history import GpuTrack, JobHistory
from torch_watchdog.report.steps import RankTrack, json_number
from torch_watchdog_proto.messages import GpuSample

__all__ = ["gpu_figures", "rank_figures", "values_by_step", "versions"]


def rank_figures(history: JobHistory) -> list[dict[str, Any]]:
    """A line a rank and attempt; the ranks that incidents began at first, then by number."""
    origins = {(found.get("attempt", 0), (found.get("origin") or {}).get("rank")) for found in history.incidents}
    ordered = sorted(history.tracks, key=lambda track: ((track.attempt, track.rank) not in origins, track.attempt, track.rank))
    return [_figures(track, history) for track in ordered]


def _figures(track: RankTrack, history: JobHistory) -> dict[str, Any]:
    last = max(track.loss) if track.loss else None
    whole = sum(track.duration_ns.values())
    return {
        "rank": track.rank,
        "attempt": track.attempt,
        "node": history.node_of.get((track.attempt, track.rank), ""),
        "steps": len(track.time_ns),
        "last_step": max(track.time_ns, default=None),
        "updates": max(track.updates.values(), default=None),
        "median_step_s": track.median_step_s,
        "loader_share": sum(track.loader_ns().values()) / whole if whole else None,
        "last_loss": None if last is None else json_number(track.loss[last]),
        "peak_bytes": max(track.peak_bytes.values(), default=None),
        "lost_records": track.lost_records,
    }


def values_by_step(history: JobHistory, column: str, divisor: float = 1) -> dict[float, list[float]]:
    """The values of all ranks by step; of several attempts the newest that came so far."""
    newest: dict[int, int] = {}
    for track in history.tracks:
        for step in getattr(track, column):
            newest[step] = max(track.attempt, newest.get(step, 0))
    found: dict[float, list[float]] = {}
    for track in history.tracks:
        for step, value in getattr(track, column).items():
            if newest[step] == track.attempt:
                found.setdefault(step, []).append(value / divisor)
    return found


def gpu_figures(history: JobHistory) -> list[dict[str, Any]]:
    """A line a GPU."""
    return [_gpu(gpu) for gpu in sorted(history.gpus.values(), key=lambda gpu: (gpu.node, gpu.samples[0].index))]


def _gpu(gpu: GpuTrack) -> dict[str, Any]:
    last = gpu.samples[-1]
    return {
        "node": gpu.node,
        "index": last.index,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "memory_total_bytes": max(sample.memory_total_bytes for sample in gpu.samples),
        "memory_used_max_bytes": max(sample.memory_used_bytes for sample in gpu.samples),
        "temperature_max_c": _over(gpu, max, lambda sample: sample.temperature_c),
        "power_mean_w": _over(gpu, fmean, lambda sample: sample.power_w),
        "utilisation_mean_percent": _over(gpu, fmean, lambda sample: sample.utilisation_percent),
        "ecc_uncorrected": _over(gpu, max, lambda sample: sample.ecc_uncorrected),
        "nvlink_errors": _over(gpu, max, lambda sample: sample.nvlink_errors),
        "xids": sorted({code for sample in gpu.samples for code in sample.xids}),
        "remap_pending": last.remap_pending,
        "lost": any(sample.lost for sample in gpu.samples),
    }


def _over(gpu: GpuTrack, of: Callable[[Iterable[float]], float], value: Callable[[GpuSample], float | None]) -> float | None:
    """None where no sample knows it."""
    known = [found for sample in gpu.samples if (found := value(sample)) is not None]
    return of(known) if known else None


def versions(history: JobHistory) -> dict[str, str]:
    """What ran: of the launch, and torch as the ranks said it."""
    found = {str(name).replace("_", "-"): str(version) for name, version in (history.record.get("versions") or {}).items()}
    torch = {match.group(1) for event in history.events if (match := re.search(r"\btorch (\d[\w.+-]*)", str(event.get("text", ""))))}
    return found | ({"torch": ", ".join(sorted(torch))} if torch else {})
