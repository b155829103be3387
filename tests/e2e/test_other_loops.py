"""The main promise for loops that hide their batches: every rank stops before the same step, whoever fetched the batch and wherever the gate is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launching import BIN, Ended, launch, script, torchrun, watchdog

pytestmark = pytest.mark.e2e

BAD = 61  # of rank 1 (odd), in its batch 7


def steps(ended: Ended) -> list[str]:
    """What both ranks have printed; two may share a line."""
    return sorted(re.findall(r"step \d+ loss \d+\.\d{6}", ended.out))


@pytest.mark.parametrize("loop", ["thread", "lightning", "ahead", pytest.param("before_step", marks=pytest.mark.slow)])
def test_all_ranks_stop_before_the_bad_batch_is_trained_on(tmp_path: Path, loop: str) -> None:
    ended = launch(tmp_path, [*watchdog("--job", loop), *torchrun(*script("other_loops.py", loop, "--bad", BAD))])
    assert ended.code == 65, ended.err
    (incident,) = ended.incidents
    assert (incident["batch"]["value"], incident["batch"]["sample"]["dataset_index"]) == (51, BAD)
    assert incident["action"]["prevented"] is True
    assert sorted(incident["action"]["ranks_stopped"]) == [0, 1]
    assert incident["action"]["checkpoint"]["committed"] is True
    trained = incident["step"]
    assert 6 <= trained <= 7
    assert len(steps(ended)) == 2 * trained


def test_a_schedule_that_moves_behind_the_next_fetch_is_not_a_step_behind_in_the_checkpoint(tmp_path: Path) -> None:
    ended = launch(tmp_path, [*watchdog("--job", "late"), *torchrun(*script("other_loops.py", "late", "--bad", BAD))])
    assert ended.code == 65, ended.err
    (incident,) = ended.incidents
    path = incident["action"]["checkpoint"]["path"]
    held = launch(tmp_path, [str(BIN / "python"), *script("other_loops.py", "check", "--path", path)]).out.split()
    assert held == ["7", "7", f"{0.01 * 0.9**7:.9f}"]


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["thread", "ahead"])
def test_of_two_bad_batches_in_flight_one_stops_the_job_and_both_are_left_out_from_then_on(tmp_path: Path, loop: str) -> None:
    command = script("other_loops.py", loop, "--bad", BAD, BAD + 8)
    stopped = launch(tmp_path, [*watchdog("--job", loop), *torchrun(*command)])
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    assert incident["batch"]["sample"]["dataset_index"] == BAD
    entries = [json.loads(line) for line in (stopped.run_dir / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(entry["dataset_index"] for entry in entries) == [BAD, BAD + 8]
    assert len({entry["dataset"] for entry in entries}) == 1


@pytest.mark.parametrize("loop", ["thread", pytest.param("lightning", marks=pytest.mark.slow)])
def test_a_skipped_batch_is_the_bad_one_and_no_other(tmp_path: Path, loop: str) -> None:
    ended = launch(tmp_path, [*watchdog("--policy", "skip", "--job", loop), *torchrun(*script("other_loops.py", loop, "--bad", BAD))])
    assert ended.code == 0, ended.err
    (incident,) = ended.incidents
    assert incident["step"] == 7
    assert len(steps(ended)) == 2 * 12


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["thread", "lightning"])
def test_a_sample_that_was_left_out_is_left_out_by_the_next_run_too(tmp_path: Path, loop: str) -> None:
    (tmp_path / "next").mkdir()
    command = script("other_loops.py", loop, "--bad", BAD)
    first = launch(tmp_path, [*watchdog("--policy", "skip", "--job", loop), *torchrun(*command)])
    again = launch(tmp_path / "next", [*watchdog("--quarantine", str(first.run_dir / "quarantine.jsonl")), *torchrun(*command)])
    assert (first.code, again.code) == (0, 0), again.err
    assert (len(first.incidents), again.incidents) == (1, [])
    assert len(steps(again)) == 2 * 12


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["thread", "lightning"])
def test_a_clean_run_is_as_without_us(tmp_path: Path, loop: str) -> None:
    watched = launch(tmp_path, [*watchdog("--job", loop), *torchrun(*script("other_loops.py", loop))])
    plain = launch(tmp_path, torchrun(*script("other_loops.py", loop)))
    assert (watched.code, plain.code) == (0, 0), watched.err
    assert steps(watched) == steps(plain)


@pytest.mark.parametrize(
    ("loop", "bad", "step"),
    [pytest.param("ahead", BAD, 7, marks=pytest.mark.slow), pytest.param("before_step", BAD, 7, marks=pytest.mark.slow), ("ahead", 93, 11)],
)
def test_a_loop_that_fetches_ahead_leaves_out_the_step_that_uses_the_bad_batch(tmp_path: Path, loop: str, bad: int, step: int) -> None:
    """Also in the last step, for which nothing is handed over any more."""
    for folder in ("skipped", "reference"):
        (tmp_path / folder).mkdir()
    skipped = launch(tmp_path / "skipped", [*watchdog("--policy", "skip"), *torchrun(*script("other_loops.py", loop, "--bad", bad))])
    reference = launch(tmp_path / "reference", torchrun(*script("other_loops.py", loop, "--leave-out", step)))
    assert (skipped.code, reference.code) == (0, 0), skipped.err
    (incident,) = skipped.incidents
    assert (incident["step"], incident["batch"]["sample"]["dataset_index"]) == (step, bad)
    assert weights(skipped) == weights(reference)


def weights(ended: Ended) -> set[str]:
    found = re.findall(r"weights ([0-9a-f]{64})", ended.out)
    assert len(found) == 2, ended.out
    return set(found)
