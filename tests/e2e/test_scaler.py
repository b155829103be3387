"""A real GradScaler: steps that it leaves out are its own matter from the very first on, and a loss that is NaN is told all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import launch, script, torchrun, watchdog

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_steps_that_a_scaler_leaves_out_are_no_finding(tmp_path: Path) -> None:
    ended = launch(tmp_path, [*watchdog("--job", "scaled"), *torchrun(*script("scaled.py"))])
    overflowed = ended.lines(r"norm (inf|nan)")
    assert any("step 0 " in line for line in overflowed), ended.out
    assert len(ended.lines(r"norm \d")) > len(overflowed)
    assert (ended.code, ended.incidents) == (0, []), ended.err


def test_a_nan_under_a_scaler_stops_the_job_and_names_its_rank(tmp_path: Path) -> None:
    ended = launch(tmp_path, [*watchdog("--job", "scaled"), *torchrun(*script("scaled.py", "--nan", 20))])
    (incident,) = [one for one in ended.incidents if one["kind"] != "scaler.collapse"]  # which follows
    assert (incident["kind"], incident["origin"]["rank"], incident["step"]) == ("loss.not_finite", 1, 20), ended.err
    assert (ended.code, incident["action"]["exit_code"]) == (70, 70), (
        ended.err
    )  # no update is called any more, and the ranks stop all the same
    assert ended.lines("step 20 norm nan") and not ended.lines("step 119 ")
