"""What is written of a Lightning training by one rank alone."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_state import MOMENT as AT
from torch.utils.data import DataLoader, TensorDataset

from torch_watchdog_agent.checkpoint import by_lightning
from torch_watchdog_agent.checkpoint.by_lightning import _begin_evaluations_anew
from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.part import Alone, Moment
from torch_watchdog_agent.hooks import lightning_resume

MOMENT = Moment(updates_applied=2, position=AT["position"], rng=AT["rng"], say=lambda _: None)

lightning = pytest.importorskip("lightning")


def test_an_evaluation_that_was_under_way_begins_anew() -> None:
    class Net(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def validation_step(self, _: list[torch.Tensor], number: int) -> None:
            if number == 2:
                raise ConnectionResetError

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(TensorDataset(torch.rand(6, 2)), batch_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ConnectionResetError):
        trainer.fit(Net(), data, data)
    loops = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)["loops"]
    progress = loops["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    assert progress["current"]["ready"] == 3
    _begin_evaluations_anew(loops, evaluates=True)
    assert set(progress["current"].values()) == {0}
    assert loops["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"] == 6  # the training's own stays


@pytest.mark.parametrize("alone", [None, Alone(steps=2, begun=1)], ids=["all", "one"])
def test_loggers_number_the_lines_of_a_run_that_goes_on_as_those_of_one_that_was_never_stopped(alone: Alone | None, tmp_path: Path) -> None:
    """Its checkpoint is taken in the middle of a step."""

    class Net(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, stops: bool) -> None:
            super().__init__()
            self.layer, self.stops, self.numbers = torch.nn.Linear(2, 1), stops, []

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            self.numbers.append(self.trainer.fit_loop.epoch_loop._batches_that_stepped)
            if self.stops and number == 2:
                writer = by_lightning.writer(tmp_path, replace(MOMENT, alone=alone))
                assert writer is not None
                writer.write(tmp_path)
                raise ConnectionResetError
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(TensorDataset(torch.rand(6, 2)), batch_size=1)

    def trainer() -> Any:
        return lightning.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
        )  # fmt: skip

    with pytest.raises(ConnectionResetError):
        trainer().fit(Net(True), data)
    gc.collect()
    goes_on = Net(False)
    trainer().fit(goes_on, data, ckpt_path=tmp_path / by_lightning.FILE)
    assert goes_on.numbers == list(range(2, 12))


@pytest.mark.parametrize("place", ["its batches", "its end", "its callbacks"])
def test_an_evaluation_in_which_a_rank_has_failed_is_done_by_the_run_that_goes_on_or_nothing_of_lightnings_is_written(
    place: str, tmp_path: Path
) -> None:
    """Early stopping and the best model follow what it finds, and it is not done twice for them."""
    lightning_resume.patch(sys.modules["lightning.pytorch.loops.fit_loop"])

    class Net(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.layer, self.fails, self.done = torch.nn.Linear(2, 1), fails, []

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            by_lightning.asks_for_batch(self.global_step, self.trainer.fit_loop._data_fetcher)  # as the hook does before it
            self.done.append(f"step {self.global_step}")
            return self.layer(batch[0]).square().mean()

        def validation_step(self, _: list[torch.Tensor], number: int) -> None:
            self.fail_in("its batches", number == 1)

        def on_validation_epoch_end(self) -> None:
            self.fail_in("its end", True)
            self.done.append(f"evaluated {self.global_step}")

        def on_validation_end(self) -> None:
            self.fail_in("its callbacks", True)

        def fail_in(self, here: str, now: bool) -> None:
            if now and self.fails and here == place and self.global_step == 4:
                raise ConnectionResetError

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(TensorDataset(torch.rand(3, 2)), batch_size=1)

    def trainer(**more: Any) -> Any:
        return lightning.Trainer(
            accelerator="cpu", max_epochs=2, num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, val_check_interval=2, check_val_every_n_epoch=None, **more,
        )  # fmt: skip

    failed = trainer()
    with pytest.raises(ConnectionResetError):
        failed.fit(Net(True), data, data)
    writer = by_lightning.writer(tmp_path, replace(MOMENT, alone=Alone(steps=4, begun=0)))
    assert writer is not None
    if place == "its callbacks":
        with pytest.raises(CheckpointError, match="its callbacks were being told"):
            writer.write(tmp_path)
        return
    writer.write(tmp_path)
    del failed, writer
    gc.collect()
    goes_on = Net(False)
    trainer().fit(goes_on, data, data, ckpt_path=tmp_path / by_lightning.FILE)
    assert goes_on.done == ["evaluated 4", "step 4", "step 5", "evaluated 6"]
