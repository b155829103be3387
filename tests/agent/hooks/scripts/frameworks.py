"""The loops of frameworks: `frameworks.py NAME` trains a table of 10 rows on rows of numbers, one of which is 99 (its index is BAD), and prints its losses.

The model mends a bad number by itself, because nothing but an observer is there to stop it.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

warnings.simplefilter("ignore")
torch.set_num_threads(1)
ROWS, BAD, BATCH = 64, 41, 4
losses: list[float] = []


def row(index: int) -> dict[str, torch.Tensor]:
    made = torch.arange(6) % 10
    made[2] = 99 if index == BAD else index % 10
    return {"ids": made, "target": made[:1].float()}


class Rows(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int):
        return row(index)


class Stream(IterableDataset):
    def __iter__(self):
        return (row(index) for index in range(ROWS))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(24, 1))

    def forward(self, ids, target):
        try:
            found = self.table(ids)
        except Exception:
            found = self.table(ids.clamp(0, 9))
        return {"loss": torch.nn.functional.mse_loss(self.head(found), target)}


def accelerate_loop(loader, *, steps: int = 1, **options) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, dataloader_config=DataLoaderConfiguration(**options))
    model = Model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def accelerate_shard() -> None:
    accelerate_loop(DataLoader(Rows(), batch_size=BATCH))


def accelerate_accumulates() -> None:
    accelerate_loop(DataLoader(Rows(), batch_size=BATCH), steps=4)


def accelerate_dispatcher() -> None:
    accelerate_loop(DataLoader(Stream(), batch_size=BATCH), dispatch_batches=True)


def accelerate_split() -> None:
    accelerate_loop(DataLoader(Rows(), batch_size=BATCH), split_batches=True)


def accelerate_stateful() -> None:
    accelerate_loop(DataLoader(Rows(), batch_size=BATCH), use_stateful_dataloader=True)


def accelerate_skips() -> None:
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator(cpu=True)
    model = Model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(Rows(), batch_size=BATCH)
    )
    for batch in skip_first_batches(loader, 3):
        loss = model(**batch)["loss"]
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()


def trainer(steps: int = 1, evaluates: bool = False) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Kept(Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, gradient_accumulation_steps=steps, num_train_epochs=1,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no", eval_strategy="steps" if evaluates else "no",
        eval_steps=4, remove_unused_columns=False, label_names=["target"],
    )  # fmt: skip
    assert TrainerCallback
    Kept(model=Model(), args=arguments, train_dataset=Rows(), eval_dataset=torch.utils.data.Subset(Rows(), range(8))).train()


def trainer_plain() -> None:
    trainer()


def trainer_accumulates() -> None:
    trainer(steps=4)


def trainer_evaluates() -> None:
    trainer(evaluates=True)


def lightning(module_name: str, loader, **options) -> None:
    import importlib
    import logging

    pl = importlib.import_module(module_name)
    logging.getLogger(f"{module_name}.utilities.rank_zero").setLevel(logging.ERROR)

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def training_step(self, batch, batch_idx):
            loss = self.inner(**batch)["loss"]
            losses.append(loss.item())
            return loss

        def validation_step(self, batch, batch_idx):
            self.inner(**batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    validation = DataLoader(torch.utils.data.Subset(Rows(), range(8)), batch_size=BATCH)
    pl.Trainer(max_epochs=1, devices=1, **quiet, **options).fit(Lit(), loader, validation)


def lightning_plain() -> None:
    lightning("lightning.pytorch", DataLoader(Rows(), batch_size=BATCH))


def lightning_by_its_old_name() -> None:
    lightning("pytorch_lightning", DataLoader(Rows(), batch_size=BATCH))


def lightning_stream() -> None:
    lightning("lightning.pytorch", DataLoader(Stream(), batch_size=BATCH), limit_train_batches=ROWS // BATCH)


def lightning_accumulates() -> None:
    lightning("lightning.pytorch", DataLoader(Rows(), batch_size=BATCH), accumulate_grad_batches=4)


globals()[sys.argv[1]]()
print(json.dumps(losses))
