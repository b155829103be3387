"""The matrix of ranks that fail or stand still: it can tell right from wrong, and the sorts that no other test launches give what they should."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rescue_matrix import ALONE, CASES, Ended, first_to_fail, judged, run, table


def ended(folder: Path, *, rank: int | None, cause: str = "the model shards the parameters", out: str = "", code: int = 1) -> Ended:
    incident = {"kind": "rank.exception", "origin": {"rank": rank}, "summary": "s", "cause": cause, "action": {"checkpoint": None}}
    place = folder / "watchdog_runs" / "job" / "incidents" / "1"
    place.mkdir(parents=True)
    (place / "incident.json").write_text(json.dumps(incident))
    (folder / "watchdog_runs" / "job" / "job.json").touch()
    return Ended(code, out, "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)", folder)


def test_what_is_right_has_no_problem(tmp_path: Path) -> None:
    found = judged(CASES["raise"], "FSDP2", ended(tmp_path, rank=1, out="rank 1 fault 10.0\nrank 0 free 10.25\n"))
    assert found == {"exit_code": 1, "launcher": True, "told": True, "kind": "rank.exception", "state": True, "free_s": 0.25}


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"rank": 1, "code": 2}, {"rank": 1, "cause": "nothing is known"}])
def test_another_culprit_exit_code_or_silence_about_the_state_is_a_problem(tmp_path: Path, wrong: dict[str, Any]) -> None:
    assert "problem" in judged(CASES["raise"], "FSDP2", ended(tmp_path, **wrong))


def test_of_two_that_raise_the_scripts_own_clock_tells_the_first_and_at_one_moment_both_are_right(tmp_path: Path) -> None:
    """A moment is what DECISIONS.md 51 says: nothing tells when an exception was raised, only when it had left the training."""
    assert first_to_fail(Ended(1, "rank 0 raises 55000000\nrank 1 raises 3000000\n", "", tmp_path)) == {1}
    assert first_to_fail(Ended(1, "rank 0 raises 3000000\nrank 1 raises 3900000\n", "", tmp_path)) == {0, None}


def test_the_table_counts_trials_and_takes_torchrun_alone_for_what_it_names_only() -> None:
    good = {"exit_code": 1, "launcher": True, "told": True, "kind": "rank.exception", "state": True, "free_s": 0.2}
    lines = table(
        {
            "finally-DDP-0": good,
            "finally-DDP-1": good | {"told": False},
            f"finally-{ALONE}-0": {"exit_code": 1, "launcher": False, "told": False},
        }
    )
    assert "| DDP | 1 of 2, rank.exception | 2 of 2 | 2 of 2: 1 | 2 of 2 | 0.20 s, 0.20 s |" in lines[2]
    assert f"| {ALONE} |  |  | 1 of 1: 1 | 0 of 1 |  |" in lines[3]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "model"), [("native", "DDP"), ("loader", "DDP"), ("worker", "FSDP2"), ("two", "DDP")])
def test_a_launch(name: str, model: str) -> None:
    found = run(name, model)
    assert "problem" not in found, found
