"""Whether the weights of what is trained are in a folder, whoever has written it: by all names, in files of each kind, under a wrapper's name too."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_state import MOMENT, subjects_of
from safetensors.torch import save_file

from torch_watchdog_agent.checkpoint import save_at
from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.weights import refuse_without_weights


@pytest.fixture(autouse=True)
def _nothing_of_another_test() -> Iterator[None]:
    yield
    gc.collect()


class Net(torch.nn.Module):
    """`out` and `table` are one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 3)
        self.out = torch.nn.Linear(4, 8, bias=False)
        self.out.weight = self.table.weight
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)


def written(*, but: str = "", prefix: str = "") -> dict[str, torch.Tensor]:
    """Of two names for one tensor the second, as transformers has it in its files."""
    state = {name: tensor for name, tensor in Net().state_dict().items() if name not in ("table.weight", but)}
    return {prefix + name: tensor.clone() for name, tensor in state.items() if "frozen" not in name}


def in_safetensors(folder: Path, state: dict[str, torch.Tensor]) -> None:
    save_file(state, folder / "model.safetensors")


def in_shards(folder: Path, state: dict[str, torch.Tensor]) -> None:
    for number, (name, tensor) in enumerate(state.items()):
        save_file({name: tensor}, folder / f"model-{number}.safetensors")


def pickled(folder: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, folder / "pytorch_model.bin")


def in_torchs_old_form(folder: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def beside_more(folder: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save({"epoch": 3, "model": state}, folder / "all.pt")


def check(folder: Path, *, renamed: bool = False) -> None:
    refuse_without_weights(folder, [Net()], but=("optimizer", "training_args"), renamed=renamed)


FORMS = [in_safetensors, in_shards, pickled, in_torchs_old_form, beside_more]


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("write", FORMS)
def test_what_holds_each_trained_parameter_is_taken_in_whatever_form(
    write: Callable[[Path, dict[str, torch.Tensor]], None], prefix: str, tmp_path: Path
) -> None:
    write(tmp_path, written(prefix=prefix))
    check(tmp_path)


@pytest.mark.parametrize("write", FORMS)
def test_what_lacks_one_of_them_is_refused_with_its_name(write: Callable[[Path, dict[str, torch.Tensor]], None], tmp_path: Path) -> None:
    write(tmp_path, written(but="head.bias"))
    torch.save(Net().state_dict(), tmp_path / "optimizer.pt")  # which holds other things
    with pytest.raises(CheckpointError, match=r"it wrote no weights of head\.bias: does the script"):
        check(tmp_path)


def test_a_file_of_another_thing_is_none_of_weights(tmp_path: Path) -> None:
    torch.save({"vocabulary": torch.ones(400)}, tmp_path / "extra.bin")
    (tmp_path / "README.md").write_text("no model")
    with pytest.raises(CheckpointError, match=r"it wrote no weights of table\.weight, head\.weight and 1 more"):
        check(tmp_path)


def test_of_names_that_its_own_kind_changes_as_many_numbers_are_enough(tmp_path: Path) -> None:
    save_file({f"adapter.{name}.weight": tensor for name, tensor in written().items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError):
        check(tmp_path)
    check(tmp_path, renamed=True)
    save_file({"adapter": torch.ones(3)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError):
        check(tmp_path, renamed=True)


def test_a_part_of_the_model_that_was_saved_by_itself_is_the_models(tmp_path: Path) -> None:
    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

    in_safetensors(tmp_path, written())
    refuse_without_weights(tmp_path, [Around()], but=(), renamed=False)


def test_nothing_that_a_file_would_run_is_run_and_it_counts_where_it_is_large_enough(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "has run",))

    torch.save({"model": Runs()}, tmp_path / "pytorch_model.bin")
    size = (tmp_path / "pytorch_model.bin").stat().st_size
    large, small = torch.nn.Linear(size, 1, bias=False), torch.nn.Linear(4, 1)
    refuse_without_weights(tmp_path, [small], but=(), renamed=False)
    with pytest.raises(CheckpointError):
        refuse_without_weights(tmp_path, [large], but=(), renamed=False)
    assert not (tmp_path / "has run").exists()


def saved(folder: Path, optimizer: Any) -> tuple[str, list[str]]:
    """The form that was written at last, and what was said."""
    said: list[str] = []
    part = save_at(folder / "step-2", subjects_of(optimizer), **MOMENT, say=said.append)
    return part.format, [line for line in said if "it wrote no weights" in line]


@pytest.mark.parametrize("writes", [True, False])
def test_a_hook_of_accelerates_that_saves_no_model_is_not_called_whole(writes: bool, tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)

    def hook(models: list[Any], weights: list[Any], folder: str) -> None:
        if writes:
            torch.save({"of": {"its": weights[0]["weight"]}, "own": weights[0]["bias"]}, Path(folder) / "mine.pt")
        weights.clear()

    accelerator.register_save_state_pre_hook(hook)
    form, said = saved(tmp_path, optimizer)
    assert (form, len(said)) == (("accelerate", 0) if writes else ("dcp", 1))


@pytest.mark.parametrize("by_itself", [False, True], ids=["for us", "what it has saved itself"])
def test_a_trainer_whose_script_saves_its_model_only_at_the_end_is_not_called_whole(by_itself: bool, tmp_path: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from torch_watchdog_agent.checkpoint.by_trainer import has_saved

    class Late(Trainer):  # type: ignore[misc]
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            if _internal_call:
                Path(str(output_dir)).mkdir(parents=True)
            else:
                super().save_model(output_dir)

    class Doing(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                if by_itself:
                    has_saved(trainer)
                ended.append(saved(tmp_path / "run", trainer.optimizer.optimizer))

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"rows": torch.full((3,), float(index))}

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3, 1)

        def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.head(rows).square().mean()}

    ended: list[tuple[str, list[str]]] = []
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True,
        save_strategy="steps", save_steps=2, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Late(model=Model(), args=args, train_dataset=Rows(), callbacks=[Doing()])
    trainer.train()
    ((form, said),) = ended
    assert (form, len(said)) == ("dcp", 1)
