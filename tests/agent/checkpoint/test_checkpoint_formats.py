"""Whose code writes the checkpoint, and what is left where it fails, holds NaN, or meets a folder of the framework's own."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_state import MOMENT, committed_here, subjects_of
from namespaces import needs_mounts, where_mounted
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import Dataset

from torch_watchdog_agent.checkpoint import by_lightning, on_checkpoint, restore, save_at
from torch_watchdog_agent.checkpoint.by_trainer import has_saved
from torch_watchdog_agent.checkpoint.errors import CheckpointError, RestoreError, in_words
from torch_watchdog_agent.checkpoint.manifest import verify
from torch_watchdog_agent.checkpoint.part import Moment
from torch_watchdog_agent.checkpoint.save import chosen

torch.set_num_threads(1)
TOGETHER = Moment(updates_applied=2, position=MOMENT["position"], rng=MOMENT["rng"], say=lambda _: None)


@pytest.fixture(autouse=True)
def _nothing_of_another_test() -> Iterator[None]:
    """A framework's objects of another test are gone, and so is its function."""
    yield
    on_checkpoint(None)
    gc.collect()


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"rows": torch.full((3,), float(index)), "labels": torch.tensor(index % 2)}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(rows)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


Doings = dict[int, Callable[[Any], None]]


def trained(folder: Path, at_step: Doings, *, at_save: Doings | None = None, **arguments: Any) -> None:
    """A Trainer's short training that does something after some of its steps, and once it has itself saved some."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Doing(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            at_step.get(state.global_step, lambda _: None)(trainer)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            (at_save or {}).get(state.global_step, lambda _: None)(trainer)

    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=5, report_to=[], disable_tqdm=True, use_cpu=True, **arguments
    )  # fmt: skip
    trainer = Trainer(model=Net(), args=args, train_dataset=Rows(), callbacks=[Doing()])
    trainer.train()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_trainer_finds_the_good_one_and_neither_it_nor_its_rotation_sees_one_with_nan(tmp_path: Path) -> None:
    from transformers.trainer_utils import get_last_checkpoint

    out, ours = tmp_path / "out", tmp_path / "run" / "step-2"

    def save(trainer: Any) -> None:
        committed_here(ours, subjects_of(trainer.optimizer))

    def save_poisoned(trainer: Any) -> None:
        with torch.no_grad():
            trainer.model.head.weight[0, 0] = float("nan")
        save(trainer)

    trained(out, {2: save, 3: save_poisoned}, save_strategy="steps", save_steps=1, save_total_limit=2)
    assert names(out) == ["checkpoint-4", "checkpoint-5", "not-good.checkpoint-3"]
    assert get_last_checkpoint(str(out)) == str(out / "checkpoint-5")
    assert not ours.parent.exists()


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


@pytest.mark.parametrize("times", [1, 2])
def test_what_the_trainer_has_just_saved_itself_stays_where_it_is_and_is_verified_and_marked(times: int, tmp_path: Path) -> None:
    theirs: dict[str, int] = {}

    def saved(trainer: Any) -> None:
        has_saved(trainer)
        (tmp_path / "checkpoint-2" / "notes.txt").write_text("of the script's own")
        theirs.update(inodes(tmp_path / "checkpoint-2"))
        for _ in range(times):
            committed_here(tmp_path / "run" / "step-2", subjects_of(trainer.optimizer))

    trained(tmp_path, {}, at_save={2: saved}, save_strategy="steps", save_steps=2)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    now = inodes(tmp_path / "checkpoint-2")
    assert theirs.items() <= now.items() and now.keys() - theirs.keys() == {"COMMITTED", "watchdog.json"}
    assert theirs.keys() == {file["name"] for file in verify(tmp_path / "checkpoint-2")["files"]}


@pytest.mark.parametrize("lacks", ["trainer_state.json", "optimizer.pt"])
def test_what_the_trainer_has_saved_and_cannot_go_on_from_steps_aside_and_is_kept(lacks: str, tmp_path: Path) -> None:
    def saved(trainer: Any) -> None:
        has_saved(trainer)
        (tmp_path / "checkpoint-2" / lacks).unlink(missing_ok=lacks == "optimizer.pt")  # a save_only_model has none
        committed_here(tmp_path / "run" / "step-2", subjects_of(trainer.optimizer))

    trained(tmp_path, {}, at_save={2: saved}, save_strategy="steps", save_steps=2, save_only_model=lacks == "optimizer.pt")
    assert {"checkpoint-2", "replaced.checkpoint-2"} <= set(names(tmp_path))
    assert {"trainer_state.json", "optimizer.pt"} <= {file["name"] for file in verify(tmp_path / "checkpoint-2")["files"]}
    assert lacks not in names(tmp_path / "replaced.checkpoint-2")


def test_what_another_launch_has_left_of_this_step_steps_aside_and_is_kept(tmp_path: Path) -> None:
    trained(tmp_path, {2: lambda trainer: committed_here(Path("unused"), subjects_of(trainer.optimizer))}, save_strategy="no")
    (tmp_path / "checkpoint-2" / "watchdog.json").unlink()  # as if the Trainer had written it
    trained(tmp_path, {2: lambda trainer: committed_here(Path("unused"), subjects_of(trainer.optimizer))}, save_strategy="no")
    assert names(tmp_path) == ["checkpoint-2", "replaced.checkpoint-2"]
    verify(tmp_path / "checkpoint-2")


def test_where_a_trainer_saves_is_noted_in_the_run_directory_before_it_does(tmp_path: Path) -> None:
    """Who is killed over it leaves what nobody would find."""
    run, noted = tmp_path / "run", list[str]()
    run.mkdir()

    def save(trainer: Any) -> None:
        rng_state = trainer._save_rng_state

        def seen(*args: Any) -> None:
            noted.append((run / "saved-elsewhere.jsonl").read_text())
            rng_state(*args)

        trainer._save_rng_state = seen
        save_at(run / "checkpoints" / "step-2", subjects_of(trainer.optimizer), **MOMENT, say=lambda _: None)

    trained(tmp_path / "out", {2: save}, save_strategy="no")
    assert list(map(json.loads, noted)) == [str(tmp_path / "out" / "checkpoint-2")] and not (run / "checkpoints").exists()


def test_a_trainer_that_cannot_save_leaves_nothing_and_ours_is_written_instead(tmp_path: Path) -> None:
    said: list[str] = []

    def save(trainer: Any) -> None:
        def broken(*_: Any) -> None:
            raise OSError("no space left on device")

        trainer._save_rng_state = broken
        part = save_at(tmp_path / "run" / "step-2", subjects_of(trainer.optimizer), **MOMENT, say=said.append)
        assert (part.format, part.path) == ("dcp", tmp_path / "run" / "step-2")

    trained(tmp_path / "out", {2: save}, save_strategy="no")
    assert names(tmp_path / "out") == [] and names(tmp_path / "run") == ["partial.step-2"]
    assert any("transformers.Trainer could not write the checkpoint (" in line and "no space left" in line for line in said)


@pytest.mark.parametrize("error", [OSError("no space left on device"), CheckpointException("a rank has failed", {})])
def test_a_users_function_that_fails_leaves_nothing_behind_and_its_error_is_told(error: BaseException, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def write(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    on_checkpoint(write)
    with pytest.raises(CheckpointError, match=type(error).__name__):
        save_at(tmp_path / "step-2", subjects_of(optimizer), **MOMENT, say=lambda _: None)
    assert names(tmp_path) == []


@needs_mounts
def test_a_full_disk_is_called_that_and_not_by_the_place_in_a_file_that_torch_names(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "full_disk.py"
    command = where_mounted("size=64k", tmp_path, [sys.executable, str(script), str(tmp_path)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said, left = done.stdout.splitlines()
    assert said.startswith(f"the disk is full: 0 bytes are left for {tmp_path} (rank 0: "), done.stderr
    assert left == "[]"


def test_of_torchs_exception_for_all_ranks_the_first_ranks_own_error_is_said() -> None:
    of_two = {1: (OSError(5, "Input/output error"), None), 0: (ValueError("half\nof it"), None)}
    assert in_words(CheckpointException("write", of_two)) == "rank 0: ValueError: half"
    assert in_words(CheckpointException("write", of_two), alone=True) == "ValueError: half"
    assert in_words(CheckpointException("write", {})).startswith("CheckpointException: ")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "no room is left"), (errno.EDQUOT, "the quota is used up"), (errno.EROFS, "is read-only"), (errno.EIO, "`dmesg`"),
        (errno.ESTALE, "mount it again"), (errno.EFBIG, "--dir"),
    ],
)  # fmt: skip
def test_what_the_system_refused_is_told_though_torch_raised_an_error_of_its_own_over_it(number: int, said: str) -> None:
    over = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    over.__context__ = OSError(number, os.strerror(number))
    rust = RuntimeError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")
    for error in (over, rust, OSError(number, os.strerror(number))):
        told = in_words(error)
        assert said in told and os.strerror(number) in told and "unexpected pos" not in told
    assert in_words(over.__context__.__class__(errno.EACCES, "Permission denied")).startswith("PermissionError: ")


def test_a_limit_on_the_size_of_files_is_told_whoever_writes_and_nothing_is_left(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "limited_file.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120)
    by_torch, _, by_the_user, left = done.stdout.splitlines()
    for said in (by_torch, by_the_user):
        assert said.startswith("a file may have 65,536 bytes in this process (RLIMIT_FSIZE): raise that where the launch begins"), done
    assert left == "[]"


def test_accelerate_writes_only_where_it_knows_everything_that_is_trained(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subjects = subjects_of(optimizer)
    assert chosen(tmp_path, subjects, TOGETHER) is None
    accelerator.prepare(model, optimizer)
    writer = chosen(tmp_path, subjects, TOGETHER)
    assert writer is not None and writer.format == "accelerate"
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    subjects.scheduler_seen(scheduler)
    assert chosen(tmp_path, subjects, TOGETHER) is None
    on_checkpoint(lambda folder: None)
    writer = chosen(tmp_path, subjects, TOGETHER)
    assert writer is not None and writer.format == "callback"


def test_the_left_out_samples_lie_in_the_checkpoint_outside_its_digests(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = committed_here(tmp_path / "step-2", subjects_of(optimizer), left_out=('{"dataset_index": 7}',))
    assert (path / "quarantine.jsonl").read_text() == '{"dataset_index": 7}\n'
    (path / "quarantine.jsonl").unlink()
    verify(path)


def test_accelerates_own_numbering_and_removal_of_old_ones_is_untouched(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    naming = ProjectConfiguration(project_dir=str(tmp_path / "project"), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=naming)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)
    accelerator.save_state()
    path = committed_here(tmp_path / "run" / "step-2", subjects_of(optimizer))
    assert verify(path)["format"] == "accelerate"
    assert names(tmp_path / "project" / "checkpoints") == ["checkpoint_0"]
    accelerator.save_state()
    assert names(tmp_path / "project" / "checkpoints") == ["checkpoint_1"]


def test_restore_names_whose_code_takes_a_trainers_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, {2: lambda trainer: committed_here(Path("unused"), subjects_of(trainer.optimizer))}, save_strategy="no")
    with pytest.raises(RestoreError, match=r"transformers wrote it\. Give it to trainer\.train\(resume_from_checkpoint="):
        restore(model=Net(), path=tmp_path / "checkpoint-2")


def test_an_engine_whose_checkpoint_could_not_be_loaded_again_writes_none(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from torch_watchdog_agent.checkpoint import by_deepspeed

    written: list[str] = []
    engine = SimpleNamespace(zero_optimization_stage=lambda: 3, save_checkpoint=written.append, optimizer=SimpleNamespace())
    with pytest.raises(CheckpointError, match="stage 3"):
        by_deepspeed._save(engine, tmp_path)
    assert written == []
    engine.zero_optimization_stage = lambda: 2
    by_deepspeed._save(engine, tmp_path)
    assert written == [str(tmp_path)]


@pytest.mark.parametrize(
    ("counts", "steps", "count"),
    [
        ([], 5, 5),  # it asks for no batches that we see
        ([(4, 4), (5, 5)], 5, 5),
        ([(4, 4), (5, 5)], 6, 6),  # the step has ended, and it has not asked since
        ([(3, 6), (4, 8), (5, 10)], 4, 8),
        ([(3, 6), (4, 8), (5, 10)], 6, 12),
        ([(3, 7), (4, 9), (5, 10)], 5, 10),  # an optimizer that does not step each time
        ([(0, 0)], 1, 1),
    ],
)
def test_lightnings_own_count_after_a_step_is_what_it_counts_by_optimizers(counts: list[tuple[int, int]], steps: int, count: int) -> None:
    assert by_lightning.count_after(steps, counts) == count
