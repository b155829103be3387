"""A training that was saved and resumed in a fresh process is, bit for bit, the training that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_runs import finished, from_step, train

pytestmark = pytest.mark.e2e

needs_fsdp2 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="torch before 2.6 cannot run FSDP2 on the CPU"
)
FLAVOURS = {
    "one process, AdamW, two workers": (1, (0, 4, 6), ("--workers", "2")),
    "one process, momentum SGD, GradScaler": (1, (4,), ("--optimizer", "sgd", "--scaler")),
    "DDP, AdamW, BatchNorm, two workers": (2, (4,), ("--kind", "ddp", "--workers", "2")),
    "FSDP2, AdamW": (2, (0, 4), ("--kind", "fsdp2")),
    "FSDP1, momentum SGD": (2, (4,), ("--kind", "fsdp1", "--optimizer", "sgd")),
    "whole tensors that differ between the ranks": (2, (4,), ("--kind", "apart")),
    "DDP, AdamW, its state spread over the ranks": (2, (0, 4), ("--kind", "ddp", "--optimizer", "zero")),
    "DDP, LBFGS, which keeps lists": (2, (4,), ("--kind", "ddp", "--optimizer", "lbfgs")),
    "lists and numbers that differ between the ranks": (2, (4,), ("--kind", "apart", "--optimizer", "lbfgs")),
}


@pytest.mark.parametrize("flavour", [pytest.param(name, marks=needs_fsdp2) if "FSDP2" in name else name for name in FLAVOURS])
def test_a_resumed_run_is_bit_identical_and_a_save_changes_nothing(flavour: str, tmp_path: Path) -> None:
    """Saved before the first step (the optimizer has never stepped), in the middle of an epoch, or after an epoch's last batch."""
    world, steps, args = FLAVOURS[flavour]
    straight = finished(tmp_path / "runs", *args, world=world)
    save = ("--save-after", *map(str, steps), "--dir", str(tmp_path / "checkpoints"))
    assert finished(tmp_path / "runs", *args, *save, world=world) == straight
    for step in steps:
        resumed = finished(tmp_path / "runs", *args, "--resume", str(tmp_path / "checkpoints" / f"step-{step}"), world=world)
        assert resumed == tuple(from_step(result, step) for result in straight)


def test_an_optimizer_without_any_state_is_resumed(tmp_path: Path) -> None:
    straight = finished(tmp_path / "runs", "--optimizer", "plain-sgd", "--save-after", "4", "--dir", str(tmp_path / "checkpoints"))
    resumed = finished(tmp_path / "runs", "--optimizer", "plain-sgd", "--resume", str(tmp_path / "checkpoints" / "step-4"))
    assert resumed == (from_step(straight[0], 4),)


def test_a_model_saved_inside_a_wrapper_is_restored_without_it(tmp_path: Path) -> None:
    straight = finished(tmp_path / "runs", "--outer", "--save-after", "4", "--dir", str(tmp_path / "checkpoints"))
    resumed = finished(tmp_path / "runs", "--resume", str(tmp_path / "checkpoints" / "step-4"))
    assert resumed == (from_step(straight[0], 4),)


def test_a_folder_of_checkpoints_stands_for_its_newest_good_one(tmp_path: Path) -> None:
    straight = finished(tmp_path / "runs", "--save-after", "2", "5", "--dir", str(tmp_path / "checkpoints"))
    resumed = finished(tmp_path / "runs", "--resume", str(tmp_path / "checkpoints"))
    assert resumed == (from_step(straight[0], 5),)


def test_two_ranks_refuse_together_what_one_rank_wrote_when_the_data_order_is_asked_for(tmp_path: Path) -> None:
    finished(tmp_path / "runs", "--save-after", "4", "--dir", str(tmp_path / "checkpoints"))
    run = train(tmp_path / "runs", "--kind", "ddp", "--resume", str(tmp_path / "checkpoints" / "step-4"), world=2)
    assert run.codes == (1, 1)
    assert all("written by 1 ranks, this run has 2" in error and "Start 1 ranks, or leave out loader=" in error for error in run.errors)


@needs_fsdp2
def test_one_rank_takes_the_model_of_two_without_their_data_order(tmp_path: Path) -> None:
    straight = finished(tmp_path / "runs", "--kind", "fsdp2", "--save-after", "4", "--dir", str(tmp_path / "checkpoints"), world=2)
    run = train(tmp_path / "runs", "--no-norm", "--no-loader", "--stop-after", "4", "--resume", str(tmp_path / "checkpoints" / "step-4"))
    assert run.codes == (0,), run.errors
    assert "finds no random state of its own" in run.errors[0]
    assert run.results[0]["lr"] != [0.001, 0.001]
    assert straight[0]["losses"]


def test_a_damaged_file_is_refused_by_every_rank(tmp_path: Path) -> None:
    finished(tmp_path / "runs", "--kind", "ddp", "--save-after", "2", "4", "--dir", str(tmp_path / "checkpoints"), world=2)
    damaged = tmp_path / "checkpoints" / "step-4" / "__1_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    run = train(tmp_path / "runs", "--kind", "ddp", "--resume", str(damaged.parent), world=2)
    assert run.codes == (1, 1)
    assert all("RestoreError" in error and "__1_0.distcp is not what was written" in error for error in run.errors)
    assert all(f"Resume from {tmp_path / 'checkpoints' / 'step-2'} instead" in error for error in run.errors)


@needs_fsdp2
def test_a_state_with_nan_is_written_marked_and_never_resumed(tmp_path: Path) -> None:
    finished(tmp_path / "runs", "--kind", "fsdp2", "--nan", "--save-after", "4", "--dir", str(tmp_path / "checkpoints"), world=2)
    marked = tmp_path / "checkpoints" / "not-good.step-4"
    assert (marked / "watchdog.json").exists() and not (marked / "COMMITTED").exists()
    run = train(tmp_path / "runs", "--kind", "fsdp2", "--resume", str(marked), world=2)
    assert run.codes == (1, 1)
    assert all("saved with NaN or infinity" in error for error in run.errors)


def test_the_users_own_function_writes_on_every_rank_and_every_file_is_in_the_manifest(tmp_path: Path) -> None:
    from torch_watchdog_agent.checkpoint.manifest import verify

    finished(tmp_path / "runs", "--kind", "ddp", "--callback", "--save-after", "4", "--dir", str(tmp_path / "checkpoints"), world=2)
    manifest = verify(tmp_path / "checkpoints" / "step-4")
    names = sorted(file["name"] for file in manifest["files"])
    assert names == ["mine-0.txt", "mine-1.txt", "rank-0.json", "rank-0.safetensors", "rank-1.json", "rank-1.safetensors"]
    assert manifest["format"] == "callback"
