"""The suite itself: its plan is whole, it can tell right from wrong, and one launch of each sort gives what it should."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import faults as on_gpu
from catalogue import FAULTS, ON_GPU, clean_runs, launches, precursor_launches
from run import but_for_the_restart, environment, judged, run


def test_every_fault_is_met_once_a_seed() -> None:
    for seed in range(3):
        placed = [fault for _, faults in (*launches(seed), *precursor_launches(seed)) for fault, _ in faults]
        assert sorted(map(FAULTS.index, placed)) == list(range(33))


def test_no_two_clean_runs_are_the_same_and_none_has_a_fault() -> None:
    runs = clean_runs()
    assert len({str(plan) for plan in runs}) == 90
    assert [plan["restart"] for plan in runs if "restart" in plan] == ["preempted", "killed"] * 3
    assert not any("faults" in plan for plan in runs)


def test_launches_beside_each_other_have_ports_of_their_own_that_the_kernel_gives_to_nobody() -> None:
    """A port that was free for a moment was another launch's by the time the ranks listened at it: one launch of 189 trained nothing."""
    ports = [int(environment()["MASTER_PORT"]) for _ in range(100)]
    first_of_the_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 100
    assert max(ports) < first_of_the_kernel


def incident(kind: str, rank: int | None, step: int) -> dict[str, Any]:
    return {"kind": kind, "origin": {"rank": rank}, "step": step, "summary": kind}


def test_a_finding_of_the_wrong_rank_is_told_but_not_right_and_one_of_another_kind_is_a_surprise() -> None:
    spike = FAULTS[0]
    found = judged([(spike, 100)], [incident("loss.spike", 0, 104), incident("gpu.xid", 0, 104)])
    assert [(one["told"], one["rank_right"]) for one in found["found"]] == [(True, False)]
    assert found["surprises"] == ["gpu.xid: gpu.xid"]


def test_a_finding_before_the_fault_is_a_surprise() -> None:
    found = judged([(FAULTS[0], 100)], [incident("loss.spike", 1, 50)])
    assert (found["found"][0]["told"], len(found["surprises"])) == (False, 1)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_launch_with_two_faults_tells_both_with_the_right_ranks() -> None:
    plan, placed = launches(0)[0]
    result = run(plan, placed)
    assert [(one["told"], one["rank_right"]) for one in result["found"]] == [(True, True), (True, True)], result


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_clean_run_is_silent() -> None:
    result = run(clean_runs()[0], [])
    assert (result["surprises"], result["exit_code"]) == ([], 0), result


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [84, 85], ids=["resumed", "next attempt"])
def test_a_clean_run_that_is_restarted_is_silent_but_for_what_ended_its_first_part(number: int) -> None:
    result = run(clean_runs()[number], [])
    assert (result["surprises"], result["exit_code"]) == ([], 0), result


def test_a_restart_whose_cause_is_not_told_or_told_as_another_is_a_surprise() -> None:
    plan, died = {"restart": "killed"}, incident("rank.died", 1, 70) | {"attempt": 0}
    assert but_for_the_restart(plan, [died]) == []
    assert len(but_for_the_restart(plan, [])) == 1
    assert but_for_the_restart(plan, [died, spike := incident("loss.spike", 1, 90) | {"attempt": 1}]) == [spike]
    assert len(but_for_the_restart(plan, [died | {"attempt": 1}])) == 2


def test_every_fault_of_a_gpu_is_met_once_a_seed_and_without_one_all_others() -> None:
    together, alone = on_gpu.launches(0)
    placed = [fault for _, _, faults in (*together, *alone) for fault, _ in faults]
    assert sorted(map(ON_GPU.index, (fault for fault in placed if fault in ON_GPU))) == list(range(len(ON_GPU)))
    here = [on_gpu.on_cpu(one) for one in (*together, *alone)]
    assert [fault.name for _, _, faults in here for fault, _ in faults] == ["slow_loader", "nan_loss", "ids_creep", "straggler_compute"]
    assert {name for _, plan, _ in here for name, *_ in plan["faults"]} == {"slow_loader", "nan_loss", "ids_creep", "straggler_compute"}


@pytest.mark.parametrize(("full_in", "holds"), [(750, True), (751, False)])
def test_a_forecast_is_held_against_the_step_in_which_the_gpu_was_full(full_in: int, holds: bool) -> None:
    """Of the words of a real launch."""
    grows = "rank 0, step 615: 108.1 GiB are allocated when a step ends, 63.6 MiB more each step: 139.8 GiB are full in step 700..750 at this rate"
    full = f"rank 0, in step {full_in}: OutOfMemoryError: CUDA out of memory."
    said = {"are full in step": grows, "out of memory": full}
    found = [{"fault": on_gpu.ALL.index(one), "told": True, "summary": said[one.says]} for one in on_gpu.named("leak")]
    forecast = on_gpu.judged({"found": found})["forecast"]
    assert (forecast["told_at"], forecast["holds"], forecast["lead"]) == (615, holds, full_in - 615)
