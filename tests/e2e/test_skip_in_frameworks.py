"""Policy skip in Trainer, Lightning and accelerate: bit-identical to a run in which no rank trained in that step, with the framework's own counters.

And two stops that resume bit-identically: accelerate with accumulation, where the micro-batches before and behind the bad one are left out, too, and Lightning
in the middle of an epoch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Ended, launch, script, torchrun, watchdog

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

BAD, LATER = 11, 7  # met in the fourth and in the sixth batch of rank 1


def both(folder: Path, train: list[str], bad: int, never: int) -> tuple[Ended, Ended]:
    """A run that meets a bad sample, and one in which its step never happens."""
    for name in ("skipped", "reference"):
        (folder / name).mkdir()
    skipped = launch(folder / "skipped", [*watchdog("--policy", "skip", "--job", "job"), *torchrun(*train, "--bad", str(bad))])
    reference = launch(folder / "reference", torchrun(*train, "--never", str(never)))
    assert (skipped.code, reference.code) == (0, 0), skipped.err + reference.err
    told = [(one["kind"], one["step"], one["action"]["policy"], one["action"]["prevented"]) for one in skipped.incidents]
    assert told == [("batch.index_out_of_range", never, "skip", True)], skipped.err
    return skipped, reference


def digests(run: Ended) -> list[str]:
    return [(run.folder / "digests" / f"digest-{rank}").read_text() for rank in (0, 1)]


@pytest.mark.parametrize(("accumulate", "bad", "never"), [(1, BAD, 3), (2, LATER, 2)])
def test_a_trainer_counts_a_skipped_step_as_one_that_a_loss_scaler_left_out(accumulate: int, bad: int, never: int, tmp_path: Path) -> None:
    """Model, optimizer, scheduler, global_step, and the learning rate in each step; also in what the Trainer itself saves right after the skipped step."""
    train = script("train_trainer.py", "--epochs", 1, "--accumulate", accumulate, "--save-steps", never + 1, "--out", "digests")
    skipped, reference = both(tmp_path, train, bad, never)
    assert digests(skipped) == digests(reference)
    assert skipped.lines(r"rank \d rate") == reference.lines(r"rank \d rate")
    assert saved_after(skipped, never) == saved_after(reference, never)


def saved_after(run: Ended, step: int) -> dict[str, bytes]:
    folder = run.folder / "trained" / f"checkpoint-{step + 1}"
    return {
        name: (folder / name).read_bytes()
        for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")
    }


def test_lightning_goes_on_as_if_the_step_had_never_been(tmp_path: Path) -> None:
    skipped, reference = both(tmp_path, script("train_lightning.py", "--epochs", 1), BAD, 3)
    assert skipped.lines("after step") == reference.lines("after step")


def test_accelerate_leaves_out_the_whole_step_of_four_micro_batches_and_calls_it_skipped(tmp_path: Path) -> None:
    train = script("train_accelerate.py", "--rows", 96, "--epochs", 1, "--accumulate", 4, "--out", "digests")
    skipped, reference = both(tmp_path, train, BAD, 1)
    assert digests(skipped) == digests(reference)


def test_accelerate_stops_before_a_whole_step_of_four_micro_batches_and_resumes_bit_identically(tmp_path: Path) -> None:
    train = script("train_accelerate.py", "--rows", 96, "--accumulate", 4, "--out", "digests")
    for name in ("stopped", "resumed", "reference"):
        (tmp_path / name).mkdir()
    stopped = launch(tmp_path / "stopped", [*watchdog("--job", "job"), *torchrun(*train, "--bad", str(BAD))])
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    checkpoint = tmp_path / "stopped" / incident["action"]["checkpoint"]["path"]
    assert (incident["step"], incident["action"]["checkpoint"]["updates_applied"]) == (1, 1)
    resumed = launch(tmp_path / "resumed", torchrun(*train, "--restore", str(checkpoint)))
    reference = launch(tmp_path / "reference", torchrun(*train, "--never", "1"))
    assert (resumed.code, reference.code) == (0, 0), resumed.err
    assert digests(resumed) == digests(reference)


@pytest.mark.parametrize("bad", [BAD, LATER])
def test_lightning_goes_on_in_the_middle_of_an_epoch_as_if_the_bad_sample_had_never_been(bad: int, tmp_path: Path) -> None:
    for name in ("stopped", "resumed", "reference"):
        (tmp_path / name).mkdir()
    stopped = launch(tmp_path / "stopped", [*watchdog("--job", "job"), *torchrun(*script("train_lightning.py", "--bad", bad))])
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    checkpoint = tmp_path / "stopped" / incident["action"]["checkpoint"]["path"] / "lightning.ckpt"
    again = script("train_lightning.py", "--bad", bad, "--ckpt", checkpoint)
    resumed = launch(tmp_path / "resumed", [*watchdog("--job", "job"), *torchrun(*again)])
    reference = launch(tmp_path / "reference", torchrun(*script("train_lightning.py", "--instead", bad)))
    assert (resumed.code, reference.code) == (0, 0), resumed.err
    assert resumed.incidents == []
    assert sorted([*stopped.lines("after step"), *resumed.lines("after step")]) == reference.lines("after step")
