"""What one rank writes for all in a framework's form: all by way of the host, where its loop is ahead of its device, and where it is not rank 0."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_state import MOMENT, subjects_of
from safetensors.torch import load_file

from torch_watchdog_agent.checkpoint.alone import save_alone
from torch_watchdog_agent.checkpoint.foreign import standing_in
from torch_watchdog_agent.checkpoint.part import Alone, SavedPart
from torch_watchdog_agent.loop import Loop
from torch_watchdog_proto.checkpoint_names import beside

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_of_another_test() -> Iterator[None]:
    yield
    gc.collect()


class Tied(torch.nn.Module):
    """Its two tables are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.second(self.first(rows))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"rows": torch.full((3,), float(index)), "labels": torch.tensor(index % 2)}


def by_way_of_the_host(value: Any) -> Any:
    """A reader as a rescue on a GPU has one: what was not read by it is not in the file. Here the host's copies are marked by a sign."""
    if isinstance(value, torch.Tensor):
        return -value.detach().clone()
    if isinstance(value, dict):
        return {key: by_way_of_the_host(item) for key, item in value.items()}
    return type(value)(map(by_way_of_the_host, value)) if type(value) in (list, tuple) else value


def saved(optimizer: Any, path: Path, alone: Alone, *, rank: int = 0, read: Any = None, say: Any = lambda _: None) -> SavedPart:
    moment = {name: MOMENT[name] for name in ("updates_applied", "position", "rng")}
    return save_alone(path, subjects_of(optimizer), rank=rank, alone=alone, read=read, say=say, **moment)


def trained(folder: Path, work: Any) -> None:
    """Three steps of a Trainer, after which it does `work`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Doing(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                work(trainer)

    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=3, report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=untied(), args=args, train_dataset=Rows(), callbacks=[Doing()])
    trainer.train()


def untied() -> torch.nn.Module:
    model = Tied()
    model.second.weight = torch.nn.Parameter(torch.eye(3))
    return model


def test_a_trainer_that_has_run_ahead_says_what_it_was_after_the_last_update(tmp_path: Path) -> None:
    parts: list[SavedPart] = []
    trained(tmp_path, lambda trainer: parts.append(saved(trainer.optimizer.optimizer, tmp_path / "own", Alone(steps=2, begun=2))))
    (part,) = parts
    assert (part.path, part.format) == (tmp_path / "checkpoint-2", "transformers")
    state = json.loads((beside(part.path, "partial") / "trainer_state.json").read_text())
    assert (state["global_step"], round(state["epoch"] * 6), [entry["step"] for entry in state["log_history"]]) == (2, 2, [1, 2])


def test_a_trainer_whose_count_cannot_be_told_from_ours_is_not_spoken_for(tmp_path: Path) -> None:
    """It has counted three steps. One more can have ended only before it has asked for a next batch."""
    not_told = [Alone(steps=5, begun=0), Alone(steps=4, begun=1), Alone(steps=2, begun=0), Alone(steps=1, begun=1)]
    parts: list[SavedPart] = []

    def save(trainer: Any) -> None:
        parts.extend(saved(trainer.optimizer.optimizer, tmp_path / "own", alone) for alone in (*not_told, Alone(steps=4, begun=0)))

    trained(tmp_path / "out", save)
    *without, counting = parts
    assert {(part.path, part.format) for part in without} == {(tmp_path / "own", "dcp")}
    assert (counting.path, counting.format) == (tmp_path / "out" / "checkpoint-4", "transformers")


def test_a_rank_that_is_not_0_writes_all_of_a_trainers_files_and_its_own_generators(tmp_path: Path) -> None:
    """Its arguments are written as they are, not as they were for the moment."""
    parts: list[SavedPart] = []

    def save(trainer: Any) -> None:
        from accelerate.state import PartialState

        with standing_in(PartialState(), process_index=1, num_processes=2):
            parts.append(saved(trainer.optimizer.optimizer, tmp_path / "own", Alone(steps=3, begun=0), rank=1))
            assert PartialState().process_index == 1

    trained(tmp_path, save)
    folder = beside(parts[0].path, "partial")
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state_1.pth"} <= {
        path.name for path in folder.iterdir()
    }
    assert not (folder / "rng_state_0.pth").exists()
    assert torch.load(folder / "training_args.bin", weights_only=False).save_only_model is False
    assert torch.load(folder / "training_args.bin", weights_only=False).logging_steps == 1


@pytest.mark.parametrize(("asked", "kept", "told"), [(True, "loss", 1), (True, None, 0), (False, "loss", 0)])
def test_an_evaluation_of_a_trainers_that_will_be_missing_is_told(asked: bool, kept: str | None, told: int, tmp_path: Path) -> None:
    """Its best model follows what evaluations find, and a run that goes on does none again."""
    said: list[str] = []

    def save(trainer: Any) -> None:
        with standing_in(trainer.control, should_evaluate=asked), standing_in(trainer.args, metric_for_best_model=kept):
            saved(trainer.optimizer.optimizer, tmp_path / "own", Alone(steps=3, begun=0), say=said.append)

    trained(tmp_path, save)
    assert len([line for line in said if "the evaluation behind step 3 had not ended" in line]) == told


def test_every_tensor_comes_by_way_of_the_host(tmp_path: Path) -> None:
    def save(trainer: Any) -> None:
        part = saved(trainer.optimizer.optimizer, tmp_path / "own", Alone(steps=3, begun=0), read=by_way_of_the_host)
        folder = beside(part.path, "partial")
        living = trainer.model.state_dict()
        assert {name: tensor.tolist() for name, tensor in load_file(folder / "model.safetensors").items()} == {
            name: (-tensor).tolist() for name, tensor in living.items()
        }
        (first, *_) = torch.load(folder / "optimizer.pt")["state"].values()
        (now, *_) = trainer.optimizer.optimizer.state_dict()["state"].values()
        assert first["exp_avg"].tolist() == (-now["exp_avg"]).tolist()
        assert trainer.model.state_dict.__func__ is torch.nn.Module.state_dict  # and is its own again
        done.append(True)

    done: list[bool] = []
    trained(tmp_path, save)
    assert done


def test_what_is_one_tensor_on_the_device_is_one_in_what_accelerate_writes(tmp_path: Path) -> None:
    """It takes no file with two names for the one, and loads none with a copy."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accelerator.prepare(model, optimizer)
    part = saved(optimizer, tmp_path / "step-2", Alone(steps=2, begun=0), read=by_way_of_the_host)
    assert part.format == "accelerate"
    before = model.first.weight.detach().clone()
    accelerator.load_state(str(beside(part.path, "partial")))
    assert torch.equal(model.first.weight, -before) and model.second.weight is model.first.weight


@pytest.mark.parametrize(
    ("gates", "opened", "back", "ended"), [(0, False, 0, 0), (3, False, 0, 3), (3, True, 1, 3), (3, False, 1, 2), (4, True, 3, 2)]
)
def test_how_many_steps_had_ended_before_the_windows_that_were_begun_last(gates: int, opened: bool, back: int, ended: int) -> None:
    """Those of the launch that it goes on from count, and one that was left out."""
    loop = Loop()
    loop.resumed(100)
    for number in range(gates):
        loop.handed_over()
        loop.gate_done(applied=number != 1)
    if opened:
        loop.handed_over()
    assert loop.steps_ended(back) == 100 + ended


def test_accelerates_count_of_batches_is_that_of_the_last_whole_step(tmp_path: Path) -> None:
    """It had begun another of two batches, which begins anew: a rank that has failed counts from 0, and all must update in the same step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = untied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)
    for _ in range(3):
        with accelerator.accumulate(model):
            pass
    part = saved(optimizer, tmp_path / "step-1", Alone(steps=1, begun=1))
    assert (part.format, accelerator.step) == ("accelerate", 3)
    accelerator.load_state(str(beside(part.path, "partial")))
    assert accelerator.step == 2
