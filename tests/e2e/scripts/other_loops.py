"""Loops that are not a plain `for` over a DataLoader: `other_loops.py NAME --bad INDEX`. Prints `step N loss L` for each update."""

import argparse
import hashlib
import os
import queue
import threading
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROWS = 96
warnings.simplefilter("ignore")


class Rows(Dataset):
    def __init__(self, bad):
        self.ids = torch.arange(ROWS * 6).reshape(ROWS, 6) % 40
        self.ids[bad, 4] = 51

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"ids": self.ids[index], "labels": torch.tensor(index % 4)}


def network():
    return nn.Sequential(nn.Embedding(40, 4), nn.Flatten(), nn.Linear(24, 4))


def prefetched(loader):
    ready = queue.Queue(2)

    def fill():
        for batch in loader:
            ready.put({key: tensor.clone() for key, tensor in batch.items()})
        ready.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


def thread(rows):
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False))
    for number, batch in enumerate(prefetched(loader)):
        loss = nn.functional.cross_entropy(model(batch["ids"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {number} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too


def one_ahead(loader):
    """The next batch is fetched before the one at hand is used."""
    coming = iter(loader)
    following = next(coming)
    while (batch := following) is not None:
        following = next(coming, None)
        yield batch, lambda: None


def before_update(loader):
    """The next batch is fetched when this one's backward has run and its update has not."""
    coming = iter(loader)
    following = next(coming)

    def fetch():
        nonlocal following
        following = next(coming, None)

    while (batch := following) is not None:
        yield batch, fetch


def ahead(rows, prefetching=one_ahead):
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False))
    for number, (batch, before_step) in enumerate(prefetching(loader)):
        loss = nn.functional.cross_entropy(model(batch["ids"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        before_step()
        if number != options.leave_out:
            optimizer.step()
        print(f"step {number} loss {loss.item():.6f}", flush=True)
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


def before_step(rows):
    ahead(rows, before_update)


def late(rows):
    """The next batch is fetched behind the update, and before the scheduler's step."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    coming = iter(DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False)))
    number, batch = 0, next(coming)
    while batch is not None:
        loss = nn.functional.cross_entropy(model(batch["ids"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch = next(coming, None)
        scheduler.step()
        print(f"step {number} loss {loss.item():.6f}", flush=True)
        number += 1
    dist.destroy_process_group()


def check(rows):
    """What the checkpoint holds of a schedule."""
    import torch_watchdog_agent

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    resumed = torch_watchdog_agent.restore(model=model, optimizer=optimizer, scheduler=scheduler, path=options.path)
    print(resumed.step, scheduler.last_epoch, f"{optimizer.param_groups[0]['lr']:.9f}")


def lightning(rows):
    import lightning.pytorch as pl

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.net(batch["ids"]), batch["labels"])

        def on_train_batch_end(self, outputs, batch, number):
            print(f"step {number} loss {outputs['loss'].item():.6f}", flush=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = pl.strategies.DDPStrategy(process_group_backend="gloo") if world_size > 1 else "auto"
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=world_size, strategy=strategy, use_distributed_sampler=False, **quiet)
    sampler = DistributedSampler(rows, num_replicas=world_size, rank=int(os.environ.get("RANK", "0")), shuffle=False)
    trainer.fit(Lit(), DataLoader(rows, batch_size=4, sampler=sampler))


parser = argparse.ArgumentParser()
parser.add_argument("loop", choices=["thread", "lightning", "ahead", "before_step", "late", "check"])
parser.add_argument("--path")
parser.add_argument("--bad", type=int, nargs="*", default=[])
parser.add_argument("--leave-out", type=int)
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
globals()[options.loop](Rows(options.bad))
