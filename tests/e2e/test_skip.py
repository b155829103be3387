"""Policy skip: the step is left out on every rank, the training equals one in which every rank skipped it, and the sample does not come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import launch, script, torchrun, watchdog

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BAD = 38  # meets rank 1 at step 4


def test_a_skipped_step_leaves_no_trace_in_any_rank(tmp_path: Path) -> None:
    (tmp_path / "skipped").mkdir()
    (tmp_path / "reference").mkdir()
    command = script("train.py", "--epochs", 1, "--out", "d")
    skipped = launch(tmp_path / "skipped", [*watchdog("--policy", "skip"), *torchrun(*command, "--bad", str(BAD))])
    reference = launch(tmp_path / "reference", torchrun(*command, "--never", "4"))
    assert skipped.code == 0, skipped.err
    assert reference.code == 0
    for rank in (0, 1):
        assert (tmp_path / "skipped" / "d" / f"digest-{rank}").read_text() == (tmp_path / "reference" / "d" / f"digest-{rank}").read_text()
    (incident,) = skipped.incidents
    assert incident["action"]["policy"] == "skip"
    assert incident["action"]["prevented"] is True
    assert incident["action"]["exit_code"] is None
    assert skipped.err.count("rank 1: step 4: ") == skipped.err.count(": left out on every rank") == 1, skipped.err


def test_the_sample_is_quarantined_and_does_not_come_back_in_the_next_epoch_or_run(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    command = script("train.py", "--epochs", 2, "--bad", BAD)
    first = launch(tmp_path / "first", [*watchdog("--policy", "skip"), *torchrun(*command)])
    assert first.code == 0, first.err
    assert len(first.incidents) == first.err.count("rank 0: samples left out from here on: 1 (") == 1, first.err
    (entry,) = [json.loads(line) for line in (first.run_dir / "quarantine.jsonl").read_text().splitlines()]
    assert (entry["dataset_index"], entry["dataset"], entry["rank"], entry["step"]) == (BAD, "Rows[48]", 1, 4)
    second = launch(tmp_path / "second", [*watchdog("--quarantine", str(first.run_dir / "quarantine.jsonl")), *torchrun(*command)])
    assert second.code == 0, second.err
    assert second.incidents == []
    assert len(second.lines("step 15 loss")) == 2
