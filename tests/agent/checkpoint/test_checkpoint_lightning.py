"""What is written of a Lightning training by one rank alone."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torch_watchdog_agent.checkpoint.by_lightning import _begin_evaluations_anew

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
    _begin_evaluations_anew(loops)
    assert set(progress["current"].values()) == {0}
    assert loops["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"] == 6  # the training's own stays
