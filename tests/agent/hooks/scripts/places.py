"""Where the data goes on if the windows that were begun last are to come again: of a loop over several epochs, four batches of its ten a window."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_watchdog_agent.hooks.active import rank

BATCHES, A_WINDOW = 10, 4

model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randint(0, 50, (2 * BATCHES, 4)), torch.randint(0, 3, (2 * BATCHES,))), batch_size=2, shuffle=True)
at_iter: dict[bytes, int] = {}
found: list[list[tuple[int, int, int]]] = []


def places(windows_back: int) -> list[tuple[int, int, int]]:
    """Epoch, batches, and of which epoch the shuffle is."""
    positions = [rank().window.position_at(back) for back in range(1, windows_back + 1)]
    return [(one.epoch, one.batches, at_iter[one.rng_at_iter.torch_cpu.numpy().tobytes()]) for one in positions]


def evaluate() -> None:
    model.eval()
    with torch.no_grad():
        for ids, _ in DataLoader(loader.dataset, batch_size=5):
            model(ids)
    model.train()


def train(epoch: int, *, until: int, look: Callable[[], None]) -> None:
    at_iter[torch.get_rng_state().numpy().tobytes()] = epoch
    for number, (ids, labels) in enumerate(loader, 1):
        nn.functional.cross_entropy(model(ids), labels).backward()
        if number == until:
            look()
        if number % A_WINDOW == 0 or number == BATCHES:
            optimizer.step()
            optimizer.zero_grad()
        if number == until and number < BATCHES:
            return


train(0, until=BATCHES, look=lambda: found.append(places(2)))  # two batches of the newest window have come
evaluate()
train(1, until=1, look=lambda: found.append(places(4)))
print(json.dumps(found))
