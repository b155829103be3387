"""The loops of frameworks are heard as plain ones are: every batch at its step, its own loss, its own sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from listening import Heard, listen_to

pytestmark = pytest.mark.e2e

ROWS, BAD, BATCH = 64, 41, 4
BATCHES = ROWS // BATCH


def losses_of(heard: Heard) -> list[float]:
    assert heard.complaints == []
    assert None not in heard.losses.values()
    return [loss for loss in heard.losses.values() if loss is not None]


@pytest.mark.parametrize("loop", ["accelerate_shard", "accelerate_split", "accelerate_stateful"])
def test_accelerates_loaders_are_one_loader_to_the_loop(folder: Path, loop: str) -> None:
    heard = listen_to(folder, "frameworks.py", loop)
    assert losses_of(heard) == pytest.approx(heard.printed)
    assert heard.steps == [1] * BATCHES
    assert set(heard.samples) == {(BAD, None)}


def test_accelerates_loss_is_the_one_before_it_is_divided(folder: Path) -> None:
    heard = listen_to(folder, "frameworks.py", "accelerate_accumulates")
    assert losses_of(heard) == pytest.approx(heard.printed)
    assert heard.steps == [4] * (BATCHES // 4)


def test_a_dispatchers_batches_are_looked_at_and_their_samples_not_guessed(folder: Path) -> None:
    heard = listen_to(folder, "frameworks.py", "accelerate_dispatcher")
    assert losses_of(heard) == pytest.approx(heard.printed)
    assert heard.noticed[0].batch.value == 99
    assert {index for index, _ in heard.samples} == {None}


def test_batches_that_accelerate_skips_shift_nothing(folder: Path) -> None:
    heard = listen_to(folder, "frameworks.py", "accelerate_skips")
    assert losses_of(heard) == pytest.approx(heard.printed)
    assert len(heard.printed) == BATCHES - 3
    assert set(heard.samples) == {(BAD, None)}


def test_each_step_of_the_trainer_is_a_window(folder: Path) -> None:
    heard = listen_to(folder, "frameworks.py", "trainer_plain")
    assert losses_of(heard) == pytest.approx(heard.printed)
    assert heard.steps == [1] * BATCHES
    assert set(heard.samples) == {(BAD, None)}


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="an older Trainer divides the loss after it has printed it")
def test_micro_batches_that_the_trainer_fetches_first_get_each_its_own_loss(folder: Path) -> None:
    heard = listen_to(folder, "frameworks.py", "trainer_accumulates")
    assert losses_of(heard) == pytest.approx(heard.printed)
    assert heard.steps == [4] * (BATCHES // 4)
    assert set(heard.samples) == {(BAD, None)}


def test_the_trainers_evaluation_is_no_training(folder: Path) -> None:
    heard = listen_to(folder, "frameworks.py", "trainer_evaluates")
    assert losses_of(heard) == pytest.approx(heard.printed)
    assert heard.evaluated == BATCHES // 4 * 2


@pytest.mark.parametrize(("loop", "sample"), [("lightning_plain", BAD), ("lightning_by_its_old_name", BAD), ("lightning_stream", None)])
def test_lightnings_loop_is_heard_through_its_fetcher(folder: Path, loop: str, sample: int | None) -> None:
    heard = listen_to(folder, "frameworks.py", loop)
    assert losses_of(heard) == pytest.approx(heard.printed)
    assert heard.steps == [1] * BATCHES
    assert heard.evaluated >= 2
    assert heard.noticed[0].batch.value == 99
    assert {index for index, _ in heard.samples} == {sample}


def test_lightnings_loss_is_what_backward_starts_from(folder: Path) -> None:
    heard = listen_to(folder, "frameworks.py", "lightning_accumulates")
    assert losses_of(heard) == pytest.approx([loss / 4 for loss in heard.printed])
    assert heard.steps == [4] * (BATCHES // 4)


def test_our_count_of_a_trainers_steps_is_its_own_whatever_the_script_did_before(tmp_path: Path) -> None:
    heard = listen_to(tmp_path, "trainer_counts.py", tmp_path / "out")
    assert [counted for counted, _ in heard.printed] == [1, 2, 3, 4, 5]
    assert all(counted == ours for counted, ours in heard.printed), heard.printed
