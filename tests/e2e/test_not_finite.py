"""What is looked at on request: in a sharded model, whose forward no rank can run alone, the module that made a loss no number; and the gradients of a loop
that never looks at them itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import launch, script, torchrun, watchdog

from torch_watchdog.store.read import read_reports

pytestmark = pytest.mark.e2e


def test_on_request_the_first_module_of_a_sharded_model_whose_output_is_not_finite_is_named_with_the_sample(tmp_path: Path) -> None:
    (tmp_path / "watchdog.toml").write_text("watch_modules = true\n")
    ended = launch(tmp_path, [*watchdog("--job", "inside"), *torchrun(*script("not_finite.py"))])
    (incident,) = ended.incidents
    assert (ended.code, incident["kind"], incident["origin"]["rank"]) == (70, "loss.not_finite", 1), ended.err
    assert "the output of 1.down (Linear, float32) is not finite" in incident["summary"], incident["summary"]
    assert "sample 41 of the data set" in incident["summary"]
    assert (ended.run_dir / incident["evidence"]["bundle"]).stat().st_size  # for `watchdog replay`


def test_the_rank_whose_loss_is_the_first_that_is_not_finite_keeps_its_batch_and_no_other_does(tmp_path: Path) -> None:
    """Where no forward can be run again to find the module."""
    ended = launch(tmp_path, [*watchdog("--job", "kept"), *torchrun(*script("not_finite.py"))])
    (incident,) = ended.incidents
    assert (ended.code, incident["kind"], incident["origin"]["rank"], incident["step"]) == (70, "loss.not_finite", 1, 10), ended.err
    assert incident["evidence"] == {"samples": [41, 43], "bundle": "bundles/0-1-step-10.safetensors"}
    assert [path.name for path in (ended.run_dir / "bundles").iterdir()] == ["0-1-step-10.safetensors"]
    assert "with samples 41, 43 of the data set" in ended.err


@pytest.mark.parametrize(
    ("options", "whose"),
    [
        ((), "all 2 ranks, step 10: the norm of the gradients is nan"),
        (("--fsdp",), "rank 0, step 10: the norm of its shard of the gradients is nan"),
    ],
    ids=["DDP", "FSDP2"],
)
def test_on_request_a_gradient_that_is_not_finite_is_named_in_its_own_step_in_a_loop_that_does_not_clip(
    tmp_path: Path, options: tuple[str, ...], whose: str
) -> None:
    """The batch was rank 1's: who only holds what became of it is not blamed."""
    (tmp_path / "watchdog.toml").write_text("watch_gradients = true\n")
    ended = launch(tmp_path, [*watchdog("--job", "gradients"), *torchrun(*script("bad_gradient.py", *options))])
    (incident,) = ended.incidents
    assert (ended.code, incident["kind"], incident["step"], incident["origin"]["rank"]) == (70, "grad.not_finite", 10, None), ended.err
    assert f"{whose}, the losses were finite" in incident["summary"], incident["summary"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--fsdp",)], ids=["DDP", "FSDP2"])
def test_looking_at_gradients_changes_no_bit_of_the_training(tmp_path: Path, options: tuple[str, ...]) -> None:
    command = torchrun(*script("bad_gradient.py", "--clean", *options))
    plain = launch(tmp_path, command)
    (tmp_path / "watchdog.toml").write_text("watch_gradients = true\n")
    watched = launch(tmp_path, [*watchdog("--job", "same"), *command])
    assert (watched.code, watched.incidents, watched.lines("loss")) == (0, [], plain.lines("loss")), watched.err
    assert len(plain.lines("loss")) == 100
    norms = [norm for _, _, report in read_reports(watched.run_dir) for block in report.blocks for norm in block.grad_norm]
    assert len(norms) == 100 and min(norms) > 0
