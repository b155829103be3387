"""A small training to scan: rows of numbers below 100 and labels below 4, some of them bad; rank and world size from the launcher."""

import argparse
import itertools
import os
import queue
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROWS = 400


class Rows(Dataset):
    def __init__(self, options):
        self.ids, self.labels = torch.arange(ROWS * 6).reshape(ROWS, 6) % 100, torch.arange(ROWS) % 4
        for index in options.bad_ids:
            self.ids[index, 2] = 100 + index
        for index in options.bad_labels:
            self.labels[index] = 4
        self.raises, self.dies = options.raises, options.dies

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if index == self.raises:
            raise ValueError(f"row {index} cannot be read")
        if index == self.dies:
            os._exit(9)
        return {"ids": self.ids[index], "labels": self.labels[index]}


parser = argparse.ArgumentParser()
parser.add_argument("--bad-ids", type=int, nargs="*", default=[])
parser.add_argument("--bad-labels", type=int, nargs="*", default=[])
parser.add_argument("--raises", type=int)
parser.add_argument("--dies", type=int)
parser.add_argument("--accelerate", action="store_true", help="its loader, which fetches a batch ahead")
parser.add_argument(
    "--feed", choices=["loader", "itself", "itself_first", "thread"], default="loader", help="where the loop has its batches from"
)
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()

torch.set_num_threads(1)
world_size = int(os.environ.get("WORLD_SIZE", "1"))
if world_size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(100, 4), nn.Flatten(), nn.Linear(24, 4))
if world_size > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = Rows(options)
sampler = DistributedSampler(rows, shuffle=False) if world_size > 1 else None
loader = None if options.feed == "itself" else DataLoader(rows, batch_size=4, sampler=sampler, num_workers=options.workers)
if options.accelerate:
    from accelerate import Accelerator

    loader = Accelerator(cpu=True).prepare(loader)


def by_itself(steps):
    for _ in range(steps):
        chosen = torch.randint(ROWS, (4,))
        yield {"ids": rows.ids[chosen], "labels": rows.labels[chosen]}


def from_thread(_):
    waiting = queue.Queue(maxsize=2)
    threading.Thread(target=lambda: [waiting.put(batch) for batch in itertools.chain(loader, [None])], daemon=True).start()
    return iter(waiting.get, None)


feeds = {
    "loader": [loader] * 3,
    "itself": [by_itself(300)],
    "itself_first": [by_itself(25), loader, loader],
    "thread": map(from_thread, range(1)),
}
for batches in feeds[options.feed]:
    for number, batch in enumerate(batches):
        loss = nn.functional.cross_entropy(model(batch["ids"]), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number}", flush=True)
if world_size > 1:
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too
