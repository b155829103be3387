"""A Lightning training on one device, which with --fails raises in its step 7. Knows nothing of the watchdog."""

from __future__ import annotations

import os
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader
from train import Net as Plain
from train import Rows


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Plain()

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch["ids"]), batch["labels"])
        if "--fails" in sys.argv and self.global_step == 7:
            raise ValueError("a fault of the script's own")
        os.write(1, f"step {self.global_step} loss {loss.item().hex()}\n".encode())
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}]


def main() -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(7, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(Rows(48, None), batch_size=3, shuffle=True))


if __name__ == "__main__":
    main()
