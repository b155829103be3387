"""One scheduler of each kind of torch's. Prints which of them would not be saved."""

import json

import torch
from torch.optim import lr_scheduler

from torch_watchdog_agent.hooks.active import rank

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
made = {
    "StepLR": lr_scheduler.StepLR(optimizer, 1),
    "LambdaLR": lr_scheduler.LambdaLR(optimizer, float),
    "OneCycleLR": lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
    "CosineAnnealingLR": lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau(optimizer),
    "SequentialLR": lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "ChainedScheduler": lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer), lr_scheduler.LinearLR(optimizer)]),
}
seen = rank().subjects.schedulers()
print(json.dumps([[name for name, one in made.items() if one not in seen], len(seen) - len(made)]))
