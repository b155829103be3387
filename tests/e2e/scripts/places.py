"""Loops of one process that an order may find at an awkward moment: `places.py NAME --meet FOLDER`. Knows nothing of the watchdog but the call that resumes.

Where the order is to come it writes `here` and waits for `go`. Prints its end: parameters, buffers, rates, schedule, random numbers.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from train import Net, Rows, digest

EPOCHS = 2


class Training:
    def __init__(self, folder: str | None) -> None:
        torch.manual_seed(7)
        torch.set_num_threads(1)
        self.folder = folder
        self.loader: Any = DataLoader(Rows(40, None), batch_size=4, shuffle=True)
        self.held_out = DataLoader(Rows(8, None), batch_size=4)
        self.model: nn.Module = Net()
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step = self.first_epoch = 0

    def restored(self, scheduler: Any) -> Any:
        import torch_watchdog_agent

        resumed = torch_watchdog_agent.restore(model=self.model, optimizer=self.optimizer, scheduler=scheduler, loader=self.loader)
        if resumed is not None:
            self.step, self.first_epoch = resumed.step, resumed.epoch
        return scheduler

    def order_comes(self, number: int) -> None:
        if self.folder and self.step == number:
            (Path(self.folder) / "here").touch()
            deadline = time.monotonic() + 60
            while not (Path(self.folder) / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            self.folder = None

    def backward(self, batch: dict[str, torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(batch["ids"]), batch["labels"]).backward()

    def update(self, batch: dict[str, torch.Tensor]) -> None:
        self.backward(batch)
        self.optimizer.step()
        self.step += 1

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            found = sum(nn.functional.cross_entropy(self.model(batch["ids"]), batch["labels"]).item() for batch in self.held_out)
        torch.rand(3)  # a sample of what it generates, say
        self.model.train()
        return found


def first(training: Training) -> None:
    """In the very first step, whose update nobody has seen yet."""
    training.restored(None)
    for _ in range(training.first_epoch, EPOCHS):
        for batch in training.loader:
            training.backward(batch)
            training.order_comes(0)
            training.optimizer.step()
            training.step += 1


def plateau(training: Training) -> None:
    """An evaluation inside the epoch, and a rate that follows what it finds."""
    scheduler = training.restored(torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer, patience=0, threshold=1.0))
    for _ in range(training.first_epoch, EPOCHS):
        for batch in training.loader:
            training.update(batch)
            training.order_comes(4)
            if training.step % 4 == 0:
                scheduler.step(training.evaluate())


def ahead(training: Training) -> None:
    """A batch is in hand while the one before is trained on."""
    scheduler = training.restored(torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9))

    def with_last() -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
        batches = iter(training.loader)
        batch = next(batches)
        for following in batches:
            yield batch, False
            batch = following
        yield batch, True

    for _ in range(training.first_epoch, EPOCHS):
        for batch, _ in with_last():
            training.update(batch)
            scheduler.step()
            training.order_comes(4)


def late(training: Training) -> None:
    """The fetch behind an epoch's last update, and the schedule behind that."""
    scheduler = training.restored(torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9))
    for _ in range(training.first_epoch, EPOCHS):
        batches = iter(training.loader)
        batch = next(batches, None)
        while batch is not None:
            training.update(batch)
            training.order_comes(10)
            batch = next(batches, None)
            scheduler.step()
        training.evaluate()


def persistent(training: Training) -> None:
    """Workers that outlive their passes: the iterator of the second epoch is that of the first."""
    training.loader = DataLoader(Rows(40, None), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    training.restored(None)
    for _ in range(training.first_epoch, EPOCHS):
        for batch in training.loader:
            training.update(batch)
            training.order_comes(14)


def unmarked(training: Training) -> None:
    """An evaluation that looks like a training: no eval(), and no_grad() around the forward alone."""
    training.restored(None)
    for _ in range(training.first_epoch, EPOCHS):
        for batch in training.loader:
            training.update(batch)
            training.order_comes(4)
            if training.step % 4 == 0:
                for held_out in training.held_out:
                    with torch.no_grad():
                        training.model(held_out["ids"])


def itself(training: Training) -> None:
    """It draws its batches itself, and knows no loader. Its batch norm and dropout are ahead of its update as the order comes."""
    rows, targets = torch.randn(40, 4), torch.randint(3, (40,))
    training.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    training.optimizer = torch.optim.Adam(training.model.parameters(), lr=0.01)
    training.loader = None
    scheduler = training.restored(torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9))
    while training.step < 20:
        drawn = torch.randint(len(rows), (6,))
        training.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(training.model(rows[drawn]), targets[drawn])
        training.order_comes(4)
        loss.backward()
        training.optimizer.step()
        training.step += 1
        scheduler.step()


def cut(training: Training) -> None:
    """Epochs that end before their data, by a break in front of the step; the order comes in the first one's last but one."""
    sampler: DistributedSampler[Any] = DistributedSampler(training.loader.dataset, num_replicas=1, rank=0)  # type: ignore[arg-type]
    training.loader = DataLoader(training.loader.dataset, batch_size=4, sampler=sampler)
    scheduler = training.restored(torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9))
    begin = training.step - 4 * training.first_epoch
    for epoch in range(training.first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(training.loader, begin):
            if number >= 4:
                break
            training.update(batch)
            training.order_comes(3)
        scheduler.step()
        begin = 0


def behind(training: Training) -> None:
    """The same by a break behind the step, with an evaluation behind that: by its count alone a loop that goes on behind the last step would do another."""
    scheduler = training.restored(torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9))
    begin = training.step - 4 * training.first_epoch
    for _ in range(training.first_epoch, EPOCHS):
        for number, batch in enumerate(training.loader, begin + 1):
            training.update(batch)
            training.order_comes(3)
            if number >= 4:
                break
        training.evaluate()
        scheduler.step()
        begin = 0


def sliced(training: Training) -> None:
    """The same by a slice, with an evaluation before all training and none behind."""
    scheduler = training.restored(torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9))
    training.evaluate()
    begin = training.step - 4 * training.first_epoch
    for _ in range(training.first_epoch, EPOCHS):
        for batch in itertools.islice(training.loader, 4 - begin):
            training.update(batch)
            training.order_comes(3)
        scheduler.step()
        begin = 0


def measured(training: Training) -> None:
    """The same, with a loss over the first batches of the training's own loader in front of all training and behind each epoch."""
    scheduler = training.restored(torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9))
    training.held_out = training.loader
    training.evaluate()
    begin = training.step - 4 * training.first_epoch
    for _ in range(training.first_epoch, EPOCHS):
        for batch in itertools.islice(training.loader, 4 - begin):
            training.update(batch)
            training.order_comes(4)
        training.evaluate()
        scheduler.step()
        begin = 0


def lightning(training: Training) -> None:
    """In an epoch's last batch: the next place where it can stop is the first fetch of the next epoch."""
    import lightning as framework

    class Module(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = training.model

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            training.step = self.global_step
            training.order_comes(9)
            return nn.functional.cross_entropy(self.net(batch["ids"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return training.optimizer

    trainer = framework.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), training.loader)
    training.step = trainer.global_step


LOOPS = {
    loop.__name__: loop for loop in (first, plateau, ahead, late, persistent, unmarked, cut, behind, sliced, measured, itself, lightning)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--meet", help="folder: where the order is to come")
    args = parser.parse_args()
    training = Training(args.meet)
    LOOPS[args.loop](training)
    print(
        training.step,
        digest(training.model, training.optimizer),
        training.optimizer.param_groups[0]["lr"].hex(),
        torch.rand(1).item().hex(),
    )


if __name__ == "__main__":
    main()
