"""A running job in as many lines as a terminal has: one a rank, or one a node where there are more ranks than lines.

Pure: a status and its incidents in, lines out. `now_s` is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from torch_watchdog.job.incident import is_order
from torch_watchdog.phrases import count, one_line
from torch_watchdog.report.text import Line, duration
from torch_watchdog_proto.envelopes import JobStatus, RankStatus

__all__ = ["live_lines"]

_AROUND = 7  # lines that are no rank's
_SILENT_S = 10.0
_SLOW_RATIO = 1.5


def live_lines(job: JobStatus, incidents: Sequence[Mapping[str, Any]], *, now_s: float, height: int, width: int) -> list[Line]:
    """Never more than `height` lines, never wider than `width`."""
    lines: list[Line] = [[(_headline(job, now_s), "bold")], _pace(job), [("", "")]]
    room = max(1, height - _AROUND)
    lines += _rank_lines(job.ranks, now_s) if len(job.ranks) <= room else _node_lines(job.ranks, now_s, room)
    lines += [[("", "")], _last_finding(incidents)]
    return [_cut(line, width) for line in lines[:height]]


def _headline(job: JobStatus, now_s: float) -> str:
    minutes, seconds = divmod(int(max(0.0, now_s - job.started_s)), 60)
    parts = [f"job {one_line(job.job)}", job.state, f"{minutes}:{seconds:02d}", count(job.world_size or len(job.ranks), "rank")]
    return ", ".join((*parts, f"policy {job.policy}", count(job.incidents, "incident")))


def _pace(job: JobStatus) -> Line:
    return [(one_line(job.standstill), "red")] if job.standstill else [(_slowest(job.ranks), "")]


def _slowest(ranks: Sequence[RankStatus]) -> str:
    known = [rank for rank in ranks if rank.step_time_s]
    if not known:
        return "no step has been reported yet"
    slow = max(known, key=lambda rank: rank.step_time_s or 0)
    typical = median(rank.step_time_s or 0 for rank in known)
    behind = min(known, key=lambda rank: rank.last_step or 0)
    text = f"median step {_step_time(typical)}, slowest rank {slow.rank} with {_step_time(slow.step_time_s)}"
    return text + f", furthest behind rank {behind.rank} at step {behind.last_step}{_updates(behind)}"


def _updates(rank: RankStatus) -> str:
    """Where the launch went on from a checkpoint, or left an update out: its steps are other numbers."""
    known = rank.updates_applied
    return "" if known is None or known == (rank.last_step or 0) + 1 else f" ({count(known, 'update')})"


def _step_time(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _rank_lines(ranks: Sequence[RankStatus], now_s: float) -> list[Line]:
    typical = median([rank.step_time_s for rank in ranks if rank.step_time_s] or [0])
    head: Line = [(f"{'rank':>6}  {'node':<16}{'phase':<8}{'step':>9}  {'loss':>10}  {'step time':>10}  seen", "dim")]
    return [head, *(_rank_line(rank, now_s, typical) for rank in sorted(ranks, key=lambda rank: rank.rank))]


def _rank_line(rank: RankStatus, now_s: float, typical_s: float) -> Line:
    loss = "" if rank.loss is None else f"{rank.loss:.4g}"
    step = "" if rank.last_step is None else str(rank.last_step)
    silent_s = None if rank.last_seen_s is None else max(0.0, now_s - rank.last_seen_s)
    text = f"{rank.rank:>6}  {one_line(rank.node)[:15]:<16}{rank.phase:<8}{step:>9}  {loss:>10}  {_step_time(rank.step_time_s):>10}  {_ago(silent_s)}"
    return [(text, _style(rank, silent_s, typical_s))]


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else "now" if seconds < 2 else f"{seconds:.0f} s ago"


def _style(rank: RankStatus, silent_s: float | None, typical_s: float) -> str:
    if not rank.alive and rank.phase != "end":
        return "bold red"
    slow = rank.step_time_s is not None and typical_s and rank.step_time_s > _SLOW_RATIO * typical_s
    return "yellow" if slow or (rank.alive and silent_s is not None and silent_s > _SILENT_S) else ""


def _node_lines(ranks: Sequence[RankStatus], now_s: float, room: int) -> list[Line]:
    """The nodes that are furthest behind first, because not all may fit."""
    nodes: dict[str, list[RankStatus]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(rank)
    lines: list[Line] = [[(f"{'node':<16}{'ranks':>7}{'alive':>7}  {'steps':>19}  {'slowest':>10}  seen", "dim")]]
    ordered = sorted(nodes.items(), key=lambda item: (min(rank.last_step or 0 for rank in item[1]), item[0]))
    shown = ordered if len(ordered) <= room - 1 else ordered[: room - 2]
    lines += [_node_line(node, of_node, now_s) for node, of_node in shown]
    if len(shown) < len(ordered):
        lines.append([(f"and {count(len(ordered) - len(shown), 'node')} that are further on", "dim")])
    return lines


def _node_line(node: str, ranks: Sequence[RankStatus], now_s: float) -> Line:
    alive = sum(rank.alive for rank in ranks)
    steps = [rank.last_step for rank in ranks if rank.last_step is not None]
    span = "" if not steps else str(steps[0]) if min(steps) == max(steps) else f"{min(steps)}..{max(steps)}"
    slowest = max((rank.step_time_s or 0 for rank in ranks), default=0)
    seen = max((rank.last_seen_s or 0 for rank in ranks), default=0)
    text = f"{one_line(node)[:15]:<16}{len(ranks):>7}{alive:>7}  {span:>19}  {_step_time(slowest or None):>10}  {_ago(now_s - seen if seen else None)}"
    return [(text, "" if alive == len(ranks) else "bold red")]


def _last_finding(incidents: Sequence[Mapping[str, Any]]) -> Line:
    found = [incident for incident in incidents if not is_order(incident)]
    if not found:
        return [("nothing found so far", "dim")]
    style = "bold red" if found[-1].get("severity") == "critical" else "yellow"
    return [(one_line(f"last finding: {found[-1].get('kind')}: {found[-1].get('summary', '')}"), style)]


def _cut(line: Line, width: int) -> Line:
    (text, style), *_ = line
    return [(text[:width].rstrip(), style)]
