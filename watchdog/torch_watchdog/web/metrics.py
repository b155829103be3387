"""Prometheus metrics of the daemon and its jobs.

Owns names, units and labels (a job of ours is `training_job`: Prometheus has a label `job` of its own); reads, never counts by itself. What a scrape
may cost is bounded: per job and per node by default, per rank only for the one job that is asked for, and no more than a fixed number of series of
nodes however many there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric, StateSetMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from torch_watchdog.daemon.live_job import LiveJob
from torch_watchdog.daemon.view import FleetView
from torch_watchdog.job.incident import is_order
from torch_watchdog_proto import __version__
from torch_watchdog_proto.envelopes import JobStatus, RankStatus

__all__ = ["exposition"]

_PREFIX = "torch_watchdog"
_STATES = ("running", "stopping", "ended")
_MAX_NODE_SERIES = 20_000
_Gauges = dict[str, GaugeMetricFamily]


def exposition(view: FleetView, *, accept: str, ranks_of: str | None) -> tuple[bytes, str]:
    """The text of one scrape and its content type. `ranks_of` adds that job's ranks. Raises UnknownJobError."""
    if ranks_of is not None:
        view.job(ranks_of)
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_Scrape(view, ranks_of))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Scrape(Collector):
    def __init__(self, view: FleetView, ranks_of: str | None) -> None:
        self._view, self._ranks_of = view, ranks_of

    def collect(self) -> Iterator[Metric]:
        jobs = [(live, live.job.status()) for live in self._view.live_jobs()]
        yield from _of_daemon(self._view, [status for _, status in jobs])
        yield from _of_jobs(jobs)
        yield from _of_incidents(jobs)
        yield from _of_nodes([status for _, status in jobs if status.state != "ended"])
        if self._ranks_of is not None:
            yield from _of_ranks(self._view.job(self._ranks_of))
        yield from _of_alerts(self._view)


def _of_daemon(view: FleetView, jobs: list[JobStatus]) -> Iterator[Metric]:
    yield InfoMetricFamily(f"{_PREFIX}_build", "The daemon's version.", {"version": __version__})
    yield _gauge("daemon_start_time_seconds", "When the daemon was started, since the epoch.", view.counters.started_s)
    yield _gauge("daemon_ready", "1 while nothing keeps the daemon from its work.", float(view.ready() is None))
    by_state = GaugeMetricFamily(f"{_PREFIX}_jobs", "Jobs that the daemon holds, by state.", labels=["state"])
    for state in _STATES:
        by_state.add_metric([state], sum(job.state == state for job in jobs))
    yield by_state
    yield _counter("reports", "Reports of nodes that were taken.", view.counters.reports)
    yield _counter("repeated_reports", "Reports that had been taken before, and came again.", view.counters.repeated_reports)
    yield _gauge(
        "store_away_seconds", "For how long the shared store has not answered; 0 where it does, or there is none.", view.store_away_s()
    )
    yield _counter("dropped_writes", "Records that the run directories did not take.", view.ingest.num_dropped_writes)
    refused = CounterMetricFamily(f"{_PREFIX}_refused_calls", "Calls that were refused, by reason.", labels=["reason"])
    for reason, count in sorted(view.counters.refused_calls.items()):
        refused.add_metric([reason], count)
    yield refused


def _of_jobs(jobs: list[tuple[LiveJob, JobStatus]]) -> Iterator[Metric]:
    states = StateSetMetricFamily(f"{_PREFIX}_job_state", "What the job does.", labels=["training_job"])
    started = _family("job_start_time_seconds", "When the job was first heard of, since the epoch.", "training_job")
    exit_codes = _family("job_exit_code", "How the job ended.", "training_job")
    lost = CounterMetricFamily(
        f"{_PREFIX}_job_lost_records", "Step records that were overwritten before they could be read.", labels=["training_job"]
    )
    gauges = _job_gauges()
    for _, status in jobs:
        states.add_metric([status.job], {state: state == status.state for state in _STATES})
        started.add_metric([status.job], status.started_s)
        lost.add_metric([status.job], status.lost_records)
        if status.exit_code is not None and status.state == "ended":
            exit_codes.add_metric([status.job], status.exit_code)
        if status.state != "ended":
            _add_job(gauges, status)
    yield from (states, started, exit_codes, lost, *gauges.values())


def _job_gauges() -> _Gauges:
    return {
        "world": _family("job_world_size", "Ranks that the job has.", "training_job"),
        "alive": _family("job_ranks_alive", "Ranks whose process is there.", "training_job"),
        "nodes": _family("job_nodes", "Nodes that have reported.", "training_job"),
        "attempt": _family("job_attempt", "Times that the launcher has started the ranks again.", "training_job"),
        "heard": _family("job_last_heard_timestamp_seconds", "When any rank was last heard of, since the epoch.", "training_job"),
        "first": _family("job_slowest_rank_step", "Newest step of the rank that is furthest behind.", "training_job"),
        "last": _family("job_step", "Newest step of the rank that is furthest ahead.", "training_job"),
        "median": _family("job_step_time_median_seconds", "Duration of the newest step, median over the ranks.", "training_job"),
        "slowest": _family("job_step_time_max_seconds", "Duration of the newest step, slowest rank.", "training_job"),
        "loss": _family("job_loss", "Newest loss, mean over the ranks.", "training_job"),
    }


def _add_job(gauges: _Gauges, status: JobStatus) -> None:
    steps = [rank.last_step for rank in status.ranks if rank.last_step is not None]
    times = [rank.step_time_s for rank in status.ranks if rank.step_time_s is not None]
    losses = [rank.loss for rank in status.ranks if rank.loss is not None]
    values = {
        "world": status.world_size or len(status.ranks),
        "alive": sum(rank.alive for rank in status.ranks),
        "nodes": len(status.nodes),
        "attempt": status.attempt,
        "heard": _newest(status.ranks),
        "first": min(steps, default=None),
        "last": max(steps, default=None),
        "median": median(times) if times else None,
        "slowest": max(times, default=None),
        "loss": math.fsum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else (math.nan if losses else None),
    }
    for name, value in values.items():
        if value is not None:
            gauges[name].add_metric([status.job], value)


def _of_incidents(jobs: list[tuple[LiveJob, JobStatus]]) -> Iterator[Metric]:
    labels = ["training_job", "kind", "severity"]
    total = CounterMetricFamily(f"{_PREFIX}_incidents", "Incidents of the job so far.", labels=labels)
    firing = GaugeMetricFamily(f"{_PREFIX}_incidents_firing", "Incidents of the job that are not resolved.", labels=labels)
    for live, status in jobs:
        faults = [found for found in live.job.incidents if not is_order(found)]
        counted = Counter((found["kind"], found["severity"]) for found in faults)
        open_now = Counter((found["kind"], found["severity"]) for found in faults if found["status"] == "firing")
        for (kind, severity), count in sorted(counted.items()):
            total.add_metric([status.job, kind, severity], count)
            firing.add_metric([status.job, kind, severity], open_now[(kind, severity)])
    yield from (total, firing)


def _of_nodes(jobs: list[JobStatus]) -> Iterator[Metric]:
    alive = _family("node_ranks_alive", "Ranks of the job on the node whose process is there.", "training_job", "node")
    heard = _family(
        "node_last_heard_timestamp_seconds", "When any rank of the node was last heard of, since the epoch.", "training_job", "node"
    )
    left_out = 0
    for status in jobs:
        by_node: dict[str, list[RankStatus]] = {node: [] for node in status.nodes}
        for rank in status.ranks:
            by_node.setdefault(rank.node, []).append(rank)
        for node, ranks in by_node.items():
            if len(alive.samples) + len(heard.samples) >= _MAX_NODE_SERIES:
                left_out += 1
                continue
            alive.add_metric([status.job, node], sum(rank.alive for rank in ranks))
            newest = _newest(ranks)
            if newest is not None:
                heard.add_metric([status.job, node], newest)
    yield from (alive, heard, _gauge("nodes_left_out", f"Nodes beyond the {_MAX_NODE_SERIES} series that a scrape holds.", left_out))


def _of_alerts(view: FleetView) -> Iterator[Metric]:
    """Receivers by their names: a handful, and no secret."""
    if view.alerting is None:
        return
    opened = GaugeMetricFamily(f"{_PREFIX}_alerts_open", "Alerts that are open.", labels=["severity"])
    by_severity = Counter(alert.severity for alert in view.alerting.desk.open_alerts)
    for severity in ("critical", "warning"):
        opened.add_metric([severity], by_severity[severity])
    told = CounterMetricFamily(f"{_PREFIX}_alert_deliveries", "Messages to receivers of alerts.", labels=["receiver", "outcome"])
    for (receiver, outcome), count in sorted(view.alerting.sender.outcomes.items()):
        told.add_metric([receiver, outcome], count)
    waiting = _gauge("alert_deliveries_waiting", "Messages that failed and are tried again.", view.alerting.desk.waiting())
    yield from (opened, told, waiting)


def _of_ranks(status: JobStatus) -> Iterator[Metric]:
    labels = ("training_job", "node", "rank")
    families = {
        "last_step": _family("rank_step", "Newest step of the rank.", *labels),
        "step_time_s": _family("rank_step_time_seconds", "Duration of the rank's newest step.", *labels),
        "loss": _family("rank_loss", "Newest local loss of the rank.", *labels),
        "last_seen_s": _family("rank_last_heard_timestamp_seconds", "When the rank was last heard of, since the epoch.", *labels),
        "alive": _family("rank_alive", "1 while the rank's process is there.", *labels),
    }
    for rank in status.ranks:
        for name, family in families.items():
            value = getattr(rank, name)
            if value is not None:
                family.add_metric([status.job, rank.node, str(rank.rank)], float(value))
    yield from families.values()


def _newest(ranks: Iterable[RankStatus]) -> float | None:
    return max((rank.last_seen_s for rank in ranks if rank.last_seen_s is not None), default=None)


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=list(labels))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"{_PREFIX}_{name}", text, value=value)
