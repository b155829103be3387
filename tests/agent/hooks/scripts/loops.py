"""Plain loops over all kinds of loaders: `loops.py NAME` trains a table of 10 rows on rows of numbers, one of which is 99, and prints its losses.

The row with the bad number has the index BAD. A step over it fails by itself, as nothing but an observer is there, and the loop goes on.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
import threading
from collections import namedtuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

torch.set_num_threads(1)
ROWS, BAD, BATCH = 64, 41, 4
Pair = namedtuple("Pair", "ids target")


@dataclasses.dataclass
class Item:
    ids: torch.Tensor
    target: torch.Tensor


def row(index: int) -> torch.Tensor:
    made = torch.arange(6) % 10
    made[2] = 99 if index == BAD else index % 10
    return made


class Rows(Dataset):
    def __init__(self, form=lambda ids: {"ids": ids, "target": ids[:1].float()}) -> None:
        self.form = form

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int):
        return self.form(row(index))


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        start, by = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(start, ROWS, by):
            yield {"ids": row(index), "target": row(index)[:1].float()}


class WithLoaderInside(Rows):
    def __getitem__(self, index: int):
        inner = list(DataLoader([torch.tensor(number) for number in range(4)], batch_size=2))
        assert len(inner) == 2
        return super().__getitem__(index)


class Whole(Rows):
    def __len__(self) -> int:
        return ROWS // BATCH

    def __getitem__(self, index: int):
        rows = torch.stack([row(index * BATCH + place) for place in range(BATCH)])
        return {"ids": rows, "target": rows[:, :1].float()}


model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Flatten(), torch.nn.Linear(24, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
losses: list[float | None] = []


def step(ids: torch.Tensor, target: torch.Tensor) -> None:
    try:
        loss = torch.nn.functional.mse_loss(model(ids), target)
    except Exception:
        losses.append(None)
        return
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()


def over(loader) -> None:
    for batch in loader:
        step(batch["ids"], batch["target"])


def plain() -> None:
    over(DataLoader(Rows(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1)))


def workers() -> None:
    over(DataLoader(Rows(), batch_size=BATCH, num_workers=2))


def persistent_workers() -> None:
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            step(batch["ids"], batch["target"])
            if epoch == 0 and number == 4:
                break  # left in the middle


def any_order() -> None:
    over(DataLoader(Rows(), batch_size=BATCH, num_workers=2, in_order=False))


def stream() -> None:
    over(DataLoader(Stream(), batch_size=BATCH))


def stream_of_workers() -> None:
    over(DataLoader(Stream(), batch_size=BATCH, num_workers=2))


def batches_of_the_data_set() -> None:
    over(DataLoader(Whole(), batch_size=None))


def stateful() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    over(StatefulDataLoader(Rows(), batch_size=BATCH))


def stateful_workers() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    over(StatefulDataLoader(Rows(), batch_size=BATCH, num_workers=2))


def loader_inside() -> None:
    over(DataLoader(WithLoaderInside(), batch_size=BATCH))


def zipped() -> None:
    ones, others = DataLoader(Rows(), batch_size=BATCH), DataLoader(Rows(), batch_size=BATCH)
    for one, other in zip(ones, others):
        step(one["ids"], other["target"])


def abandoned() -> None:
    loader = DataLoader(Rows(), batch_size=BATCH)
    for _ in range(3):
        for number, batch in enumerate(loader):
            step(batch["ids"], batch["target"])
            if number == 2:
                break
    over(loader)


def named_tuples() -> None:
    for batch in DataLoader(Rows(lambda ids: Pair(ids, ids[:1].float())), batch_size=BATCH):
        step(batch.ids, batch.target)


def nested() -> None:
    for batch in DataLoader(Rows(lambda ids: {"in": {"ids": [ids]}, "target": ids[:1].float()}), batch_size=BATCH):
        step(batch["in"]["ids"][0], batch["target"])


def dataclasses_made_by_collation() -> None:
    def collate(rows):
        return Item(torch.stack([one["ids"] for one in rows]), torch.stack([one["target"] for one in rows]))

    for batch in DataLoader(Rows(), batch_size=BATCH, collate_fn=collate):
        step(batch.ids, batch.target)


def a_worker_fails() -> None:
    class Failing(Rows):
        def __getitem__(self, index: int):
            if index == 30:
                raise KeyError(index)
            return super().__getitem__(index)

    batches = iter(DataLoader(Failing(), batch_size=BATCH, num_workers=1))
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except KeyError:
            continue
        step(batch["ids"], batch["target"])


def watched_generator() -> None:
    import torch_watchdog_agent

    def batches():
        for first in range(0, ROWS, BATCH):
            rows = torch.stack([row(index) for index in range(first, first + BATCH)])
            yield {"ids": rows, "target": rows[:, :1].float()}

    over(torch_watchdog_agent.watch(batches()))


def watched_transform() -> None:
    import torch_watchdog_agent

    def changed():
        for batch in DataLoader(Rows(), batch_size=BATCH):
            yield {"ids": batch["ids"].clone(), "target": batch["target"], "more": batch["ids"] * 0}

    over(torch_watchdog_agent.watch(changed()))


def watched_shuffle_buffer() -> None:
    import torch_watchdog_agent

    def mixed():
        held = []
        for batch in DataLoader(Rows(), batch_size=BATCH):
            held.append({"ids": batch["ids"].clone(), "target": batch["target"].clone()})
            if len(held) == 3:
                yield held.pop(1)
        yield from held

    over(torch_watchdog_agent.watch(mixed()))


def evaluation_between() -> None:
    for _ in range(2):
        model.train()
        for number, batch in enumerate(DataLoader(Rows(), batch_size=BATCH)):
            step(batch["ids"], batch["target"])
            if number == 4:
                break
        model.eval()
        for number, batch in enumerate(DataLoader(Rows(), batch_size=BATCH)):
            model(batch["ids"])
            if number == 2:
                break


def trains_in_eval_mode() -> None:
    model.eval()
    over(DataLoader(Rows(), batch_size=BATCH))


def declared() -> None:
    """A table with room for 100 rows, of which only the first ten mean something: nothing but the declaration says so."""
    global model, optimizer
    import torch_watchdog_agent

    torch_watchdog_agent.declare_bound("ids", low=0, high=9)
    model = torch.nn.Sequential(torch.nn.Embedding(100, 4), torch.nn.Flatten(), torch.nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    over(DataLoader(Rows(), batch_size=BATCH))


def gates_by_hand() -> None:
    import torch_watchdog_agent

    torch_watchdog_agent.attach(model=model)
    for batch in DataLoader(Rows(), batch_size=BATCH):
        if BAD in range(len(losses) * BATCH, len(losses) * BATCH + BATCH):
            losses.append(0.0)
            continue
        loss = torch.nn.functional.mse_loss(model(batch["ids"]), batch["target"])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        if torch_watchdog_agent.step():
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients):
                    parameter -= 1e-3 * gradient


def background_thread() -> None:
    optimizer.step()  # nothing to do yet: the first gate makes this process a rank
    over(_prefetched(DataLoader(Rows(), batch_size=BATCH)))


def background_thread_that_copies() -> None:
    optimizer.step()
    loader = DataLoader(Rows(), batch_size=BATCH)
    over(_prefetched({key: tensor.clone() for key, tensor in batch.items()} for batch in loader))


def _prefetched(loader, ahead: int = 2):
    ready: queue.Queue = queue.Queue(ahead)

    def fill() -> None:
        for batch in loader:
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


globals()[sys.argv[1]]()
print(json.dumps(losses))
