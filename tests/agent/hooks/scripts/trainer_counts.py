"""Two trainings of a Trainer, the second from the first one's checkpoint, and a step of the script's own before each: what it counts, and what we do."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from torch_watchdog_agent.hooks.active import rank


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.head(rows), labels)}


class Counting(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        counted.append((state.global_step, rank().loop.steps_ended(0)))


def step_by_hand(model: Net) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(data, batch_size=len(data)):
        model(**batch)["loss"].backward()
        optimizer.step()


counted: list[tuple[int, int]] = []
data = [{"rows": torch.full((3,), float(index)), "labels": torch.tensor(index % 2)} for index in range(12)]
for steps, resume in ((3, None), (5, f"{sys.argv[1]}/checkpoint-3")):
    args = TrainingArguments(
        output_dir=sys.argv[1], per_device_train_batch_size=2, max_steps=steps, save_steps=3, report_to=[], disable_tqdm=True, use_cpu=True
    )
    model = Net()
    step_by_hand(model)
    Trainer(model=model, args=args, train_dataset=data, callbacks=[Counting()]).train(resume_from_checkpoint=resume)
print(json.dumps(counted))
