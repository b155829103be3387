"""Trains a model, deletes it, and prints what is alive all the same. Knows nothing of the watchdog."""

from __future__ import annotations

import gc
import sys
import weakref

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(device: str) -> dict[str, weakref.ref]:
    body = [nn.Embedding(100, 8), nn.Flatten(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 10)]
    model = nn.Sequential(*body).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, model=model: 1.0)
    scaler = torch.amp.GradScaler(device)
    loader = DataLoader(TensorDataset(torch.randint(0, 100, (96, 4)), torch.randint(0, 10, (96,))), batch_size=8)
    for ids, labels in loader:
        ids, labels = ids.to(device), labels.to(device)
        loss = nn.functional.cross_entropy(model(ids), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    weight = model[2].weight
    made = {
        "model": model, "weight": weight, "buffer": model[3].running_mean, "optimizer": optimizer, "moment": optimizer.state[weight]["exp_avg"],
        "scheduler": scheduler, "scaler": scaler, "loss": loss, "loader": loader, "data": loader.dataset,
    }  # fmt: skip
    if device != "cpu":
        made |= {"ids": ids, "labels": labels}  # on the host the last batch is held until the next one, for a bundle
    return {name: weakref.ref(item) for name, item in made.items()}


left = train(sys.argv[1])
gc.collect()
print("alive:", [name for name, item in left.items() if item() is not None])
