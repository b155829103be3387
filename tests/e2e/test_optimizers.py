"""Optimizers that are not one plain step behind backward: a bad batch stops all ranks cleanly, and a skip equals a run without its step."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Ended, launch, script, torchrun, watchdog

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

BAD, STEP = 61, 7
KINDS = ["zero", "lbfgs", "sam", "in_backward", "two"]


def run(folder: Path, *words: object, ours: tuple[str, ...] | None) -> Ended:
    command = torchrun(*script("optimizers.py", *words))
    return launch(folder, command if ours is None else [*watchdog("--job", "job", *ours), *command])


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_stop_before_the_step(kind: str, tmp_path: Path) -> None:
    stopped = run(tmp_path, kind, "--bad", BAD, ours=())
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    assert (incident["step"], incident["batch"]["sample"]["dataset_index"], incident["action"]["prevented"]) == (STEP, BAD, True)
    assert sorted(incident["action"]["ranks_stopped"]) == [0, 1] and incident["action"]["checkpoint"]["updates_applied"] == STEP
    assert len(stopped.lines(r"step \d+$")) == 2 * STEP


@pytest.mark.parametrize("kind", KINDS)
def test_a_skip_equals_a_run_in_which_no_rank_took_the_step(kind: str, tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    skipped = run(tmp_path, kind, "--bad", BAD, ours=("--policy", "skip"))
    reference = run(tmp_path / "reference", kind, "--never", STEP, ours=None)
    assert (skipped.code, reference.code) == (0, 0), skipped.err
    assert len(skipped.incidents) == 1
    assert skipped.lines("weights") == reference.lines("weights") != []


def test_a_state_in_the_middle_of_an_optimizers_closures_is_never_saved(tmp_path: Path) -> None:
    """LBFGS has moved the parameters twice in its fourth step when rank 1 is killed in the third evaluation of the closure."""
    died = run(tmp_path, "lbfgs", "--dies", 12, ours=())
    (incident,) = died.incidents
    assert (died.code, incident["kind"], incident["origin"]["rank"]) == (1, "rank.died", 1), died.err
    assert incident["action"]["checkpoint"] is None, died.err
    assert "a half step is never saved" in died.err
