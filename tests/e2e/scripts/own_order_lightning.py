"""A Lightning training in which each rank shuffles all the data by itself: `--own`, by a generator of its loader's, else by torch's own. With --fails rank 1
raises in the middle of its second epoch. It says which sample each rank trains on, and knows nothing of the watchdog.
"""

import os
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, number):
        sample = int(batch[0])
        os.write(1, f"rank {self.global_rank} epoch {self.current_epoch} batch {number} sample {sample}\n".encode())
        if "--fails" in sys.argv and (self.global_rank, self.current_epoch, number) == (1, 1, 3):
            raise ValueError("a fault of the script's own")
        return self.layer(batch[0] / 8).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.set_num_threads(1)
rank, has_own = int(os.environ.get("RANK", "0")), "--own" in sys.argv
lightning.seed_everything(7 if has_own else 7 + rank, verbose=False)
generator = torch.Generator().manual_seed(40 + rank) if has_own else None
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Net(), DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=1, shuffle=True, generator=generator))
