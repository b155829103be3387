"""The chaos harness on one seed, as a test: blows on every part of a launch change no bit of the training; and a result that is wrong is called so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from chaos import table, trial, undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
STEPS = 60


def test_a_training_under_blows_comes_out_to_the_last_bit_as_one_that_nobody_watches() -> None:
    result = trial(0, undisturbed(STEPS), STEPS)
    assert (result["outcome"], result["fatal"]) == ("identical", None), result
    assert result["blows"] >= 8, result


def test_another_result_than_the_undisturbed_one_is_called_wrong() -> None:
    result = trial(0, ["another", "result"], 5)
    assert result["outcome"] == "WRONG"
    known = {"command": "c", "date": "d", "versions": {"torch": "t", "python": "p"}, "machine": {"cores": 2}, "trials": {"0": result}}
    assert "| nothing fatal | WRONG | 1 |" in table(known)
