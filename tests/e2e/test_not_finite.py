"""A loss that is no number in a sharded model, whose forward no rank can run alone: on request the module is named that made it."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import launch, script, torchrun, watchdog

pytestmark = pytest.mark.e2e


def test_on_request_the_first_module_of_a_sharded_model_whose_output_is_not_finite_is_named_with_the_sample(tmp_path: Path) -> None:
    (tmp_path / "watchdog.toml").write_text("watch_modules = true\n")
    ended = launch(tmp_path, [*watchdog("--job", "inside"), *torchrun(*script("not_finite.py"))])
    (incident,) = ended.incidents
    assert (ended.code, incident["kind"], incident["origin"]["rank"]) == (70, "loss.not_finite", 1), ended.err
    assert "the output of 1.down (Linear, float32) is not finite" in incident["summary"], incident["summary"]
    assert "sample 41 of the data set" in incident["summary"]
