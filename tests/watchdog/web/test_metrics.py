"""What Prometheus reads: names, values, and how much of it there can be."""

from __future__ import annotations

import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_harness import BAD_TOKEN, Fleet, until
from prometheus_client.parser import text_string_to_metric_families
from services import needs, program

from torch_watchdog.daemon.counters import Counters
from torch_watchdog.web.metrics import exposition
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import JobStatus, RankStatus


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float | None:
    return samples(text).get((f"torch_watchdog_{name}", tuple(sorted(labels.items()))))


def large_job(num_ranks: int, per_node: int = 8) -> JobStatus:
    ranks = tuple(
        RankStatus(rank=rank, node=f"node-{rank // per_node}", pid=rank, phase="train", alive=True, last_step=rank % 7, loss=1.5,
                   step_time_s=0.25, last_seen_s=100.0)
        for rank in range(num_ranks)
    )  # fmt: skip
    nodes = tuple(f"node-{node}" for node in range(num_ranks // per_node))
    return JobStatus(
        job="big", state="running", policy="stop", attempt=0, world_size=num_ranks, run_dir="/r", started_s=1.0, nodes=nodes, ranks=ranks
    )


def fake_view(*jobs: JobStatus) -> Any:
    live = [SimpleNamespace(job=SimpleNamespace(status=lambda status=status: status, incidents=())) for status in jobs]
    return SimpleNamespace(
        live_jobs=lambda: live, job=lambda name: jobs[0], counters=Counters(started_s=1.0), ready=lambda: None, alerting=None,
        ingest=SimpleNamespace(num_dropped_writes=0),
        store_away_s=float,
    )  # fmt: skip


def test_a_running_job_shows_its_ranks_steps_and_times(fleet: Fleet) -> None:
    node = fleet.node()
    node.rank(0, 2)
    node.rank(1, 2)
    node.steps(0, 0, 1, 2, loss=1.0)
    node.steps(1, 0, 1, loss=3.0)
    text = until(lambda: (found := fleet.get("metrics").text) and value(found, "job_ranks_alive", training_job="job") == 2.0 and found)
    assert value(text, "job_step", training_job="job") == 2.0
    assert value(text, "job_slowest_rank_step", training_job="job") == 1.0
    assert value(text, "job_step_time_median_seconds", training_job="job") == pytest.approx(0.002)
    assert value(text, "job_loss", training_job="job") == 2.0
    assert value(text, "job_world_size", training_job="job") == 2.0
    assert value(text, "job_state", training_job="job", torch_watchdog_job_state="running") == 1.0
    assert value(text, "node_ranks_alive", training_job="job", node="node-0") == 2.0
    assert value(text, "reports_total") == 2.0
    heard = value(text, "job_last_heard_timestamp_seconds", training_job="job")
    assert heard is not None and abs(heard - time.time()) < 60


def test_incidents_are_counted_by_kind_and_stop_firing_with_the_job(fleet: Fleet) -> None:
    node = fleet.node()
    node.rank(0, 1)
    node.say(m.Noticed(rank=0, step=3, micro_step=0, violation=BAD_TOKEN))
    until(lambda: fleet.incidents())
    labels = {"training_job": "job", "kind": "batch.index_out_of_range", "severity": "critical"}
    text = fleet.get("metrics").text
    assert value(text, "incidents_total", **labels) == 1.0
    assert value(text, "incidents_firing", **labels) == 1.0
    node.goodbye(3)
    text = fleet.get("metrics").text
    assert value(text, "incidents_firing", **labels) == 0.0
    assert value(text, "job_exit_code", training_job="job") == 3.0
    assert value(text, "job_step", training_job="job") is None  # an ended job leaves no gauge that looks alive


def test_ranks_are_shown_for_the_one_job_that_is_asked_for(fleet: Fleet) -> None:
    node = fleet.node()
    node.rank(0, 1)
    node.steps(0, 4)
    assert value(fleet.get("metrics").text, "rank_step", training_job="job", node="node-0", rank="0") is None
    assert value(fleet.get("metrics?ranks=job").text, "rank_step", training_job="job", node="node-0", rank="0") == 4.0
    assert fleet.get("metrics?ranks=nobody").status_code == 404


def test_a_scrape_of_16384_ranks_stays_small_and_quick() -> None:
    view = fake_view(large_job(16_384))
    began = time.process_time()
    text, _ = exposition(view, accept="", ranks_of=None)
    took_s = time.process_time() - began
    assert len(samples(text.decode())) < 2 * 2_048 + 60
    assert took_s < 5.0  # about 0.1 s here; a scrape may take 10


def test_series_of_nodes_are_bounded_over_many_jobs_and_what_is_left_out_is_counted() -> None:
    jobs = [large_job(16_384) for _ in range(8)]
    text, _ = exposition(fake_view(*jobs), accept="", ranks_of=None)
    lines = [line for line in text.decode().splitlines() if line.startswith("torch_watchdog_node_")]
    assert len(lines) <= 20_000
    assert value(text.decode(), "nodes_left_out") == 8 * 2_048 - 10_000


def test_openmetrics_is_spoken_where_it_is_asked_for(fleet: Fleet) -> None:
    answer = fleet.get("metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@needs("promtool")
def test_promtool_finds_nothing_to_say_about_names_and_units(fleet: Fleet) -> None:
    node = fleet.node()
    node.rank(0, 1)
    node.steps(0, 4)
    node.say(m.Noticed(rank=0, step=5, micro_step=0, violation=BAD_TOKEN))
    until(lambda: fleet.incidents())
    text = fleet.get("metrics?ranks=job").text
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
