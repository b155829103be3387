"""A place in the data that tells how the loop goes on is taken; one that does not is refused or said, and never taken in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_state import MOMENT, committed_here, subjects_of
from torch.utils.data import DataLoader, TensorDataset

from torch_watchdog_agent.checkpoint import restore
from torch_watchdog_agent.checkpoint.errors import RestoreError
from torch_watchdog_agent.checkpoint.rank_file import RankFile
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.hooks import loader as loader_hooks
from torch_watchdog_agent.hooks import own_order

RANDOM = RngState.capture()


def saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **place: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any], Path]:
    import torch.utils.data.dataloader as module

    loader_hooks.patch(module)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    monkeypatch.setitem(MOMENT, "position", replace(MOMENT["position"], **place))
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=1)
    return model, optimizer, loader, committed_here(folder / "step-2", subjects_of(optimizer))


def test_several_loaders_in_turn_have_no_single_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, loader, path = saved(tmp_path, monkeypatch, in_turn=True, rng_at_iter=RANDOM)
    with pytest.raises(RestoreError, match=r"several passes over loaders in turn.*Leave out loader="):
        restore(model=model, optimizer=optimizer, loader=loader, path=path)
    assert restore(model=model, optimizer=optimizer, path=path) is not None


@pytest.mark.parametrize("several", [list, tuple, lambda loaders: dict(enumerate(loaders))])
def test_a_list_of_one_loader_does_as_that_loader_and_one_of_several_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: Any
) -> None:
    model, optimizer, loader, path = saved(tmp_path, monkeypatch, epoch=0, batches=2, rng_at_iter=RANDOM)
    before = [weight.clone() for weight in model.parameters()]
    for count in (0, 2):
        with pytest.raises(RestoreError, match=r"the place in the data is that of one.*Give the one"):
            restore(model=model, optimizer=optimizer, loader=several([loader] * count), path=path)
    assert all(map(torch.equal, before, model.parameters()))
    assert restore(model=model, optimizer=optimizer, loader=several([loader]), path=path) is not None
    assert len(list(loader)) == 2


def test_a_place_that_nobody_saw_is_said_to_be_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of a loop whose batches come through a thread of its own."""
    model, optimizer, loader, path = saved(tmp_path, monkeypatch, batches=0, rng_at_iter=None)
    assert restore(model=model, optimizer=optimizer, loader=loader, path=path) is not None
    assert f"where its data stood is not known in {path}" in capfd.readouterr().err
    assert len(list(loader)) == 4


class ForAllEpochs(DataLoader[Any]):
    """As timm's MultiEpochsDataLoader and YOLO's InfiniteDataLoader do it."""

    class Repeating:
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __len__(self) -> int:
            return len(self.sampler)

        def __iter__(self) -> Any:
            while True:
                yield from iter(self.sampler)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", self.Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


@pytest.mark.parametrize(("batches", "epoch"), [(3, 0), (7, 1)])
def test_a_loader_that_keeps_one_iterator_for_all_epochs_is_said_to_begin_its_epoch_anew(
    batches: int, epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It had gone on in another order in silence, and from epoch 0, whose batches had not ended since."""
    model, optimizer, _, path = saved(tmp_path, monkeypatch, batches=batches, rng_at_iter=RANDOM)
    loader = ForAllEpochs(TensorDataset(torch.arange(4.0)), batch_size=1)
    resumed = restore(model=model, optimizer=optimizer, loader=loader, path=path)
    assert resumed is not None and (resumed.epoch, resumed.batches) == (epoch, 0)
    assert f"keeps one iterator for all epochs, made before restore(), so that no place in its data can be gone back to: epoch {epoch}" in (
        capfd.readouterr().err
    )
    assert [len(list(loader)) for _ in range(2)] == [4, 4]


def test_a_loader_that_keeps_an_iterator_for_its_workers_or_beside_its_passes_goes_on_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer, loader, path = saved(tmp_path, monkeypatch, batches=3, rng_at_iter=RANDOM)
    loader.looked_at = iter(loader)  # type: ignore[attr-defined]
    assert next(loader.looked_at)[0].item() == 0  # type: ignore[attr-defined]
    assert restore(model=model, optimizer=optimizer, loader=loader, path=path) is not None
    assert [len(list(loader)) for _ in range(2)] == [1, 4]
    assert "keeps one iterator" not in capfd.readouterr().err


def test_an_evaluation_before_the_training_leaves_the_place_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, loader, path = saved(tmp_path, monkeypatch, batches=3, rng_at_iter=RANDOM)
    assert restore(model=model, optimizer=optimizer, loader=loader, path=path) is not None
    with torch.no_grad():
        assert len(list(loader)) == 4
    assert [len(list(loader)) for _ in range(2)] == [1, 4]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_scheduler_that_steps_at_the_head_of_an_epoch_does_not_step_twice_in_the_one_that_goes_on(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer, loader, _ = saved(tmp_path, monkeypatch, batches=3, rng_at_iter=RANDOM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    subjects = subjects_of(optimizer)
    subjects.scheduler_seen(scheduler)
    scheduler.step()  # of the epoch in which the checkpoint is
    path = committed_here(tmp_path / "with", subjects)
    assert restore(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, path=path) is not None
    rates = []
    for _ in range(2):
        for _ in range(steps):
            scheduler.step()
        assert list(loader)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == ([0.05, 0.025] if steps else [0.05, 0.05])
    assert ("a scheduler has stepped between restore() and the epoch's data" in capfd.readouterr().err) is bool(steps)


def test_a_scheduler_that_cannot_be_put_back_is_said_and_breaks_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails() -> bool:
        raise ValueError("no such group")

    model, optimizer, loader, path = saved(tmp_path, monkeypatch, batches=3, rng_at_iter=RANDOM)
    monkeypatch.setattr("torch_watchdog_agent.checkpoint.window.kept_schedules", lambda _: fails)
    assert restore(model=model, optimizer=optimizer, loader=loader, path=path) is not None
    assert len(list(loader)) == 1
    assert "could not be put back to where the checkpoint has it (ValueError: no such group)" in capfd.readouterr().err


def shuffling(kind: str) -> Any:
    """A loader as a new process of the same script makes it."""
    torch.manual_seed(5)
    rows = TensorDataset(torch.arange(16.0))
    if kind == "torch":
        return DataLoader(rows, batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(3))
    if kind == "sampler":
        sampler = torch.utils.data.WeightedRandomSampler(torch.ones(16), 16, generator=torch.Generator().manual_seed(3))
        return DataLoader(rows, batch_size=1, sampler=sampler)
    from accelerate import PartialState
    from accelerate.data_loader import prepare_data_loader

    PartialState(cpu=True)
    seedable = kind == "accelerate, seedable"
    made = DataLoader(rows, batch_size=1, shuffle=True)
    try:
        return prepare_data_loader(made, num_processes=2, process_index=0, put_on_device=False, use_seedable_sampler=seedable, data_seed=5)
    finally:
        PartialState._reset_state()


@pytest.mark.parametrize("kind", ["torch", "sampler", "accelerate", "accelerate, seedable"])
def test_a_loader_that_draws_its_order_by_itself_goes_on_in_that_of_its_epoch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made anew, as it was before the first epoch, and the checkpoint is of the second: that had come again in the first one's order."""
    whole = shuffling(kind)
    first = [batch.item() for (batch,) in whole]
    begins = {"rng_at_iter": RngState.capture(own_order.generators_of(whole)), "count_at_iter": own_order.count_of(whole)}
    second, third = ([batch.item() for (batch,) in whole] for _ in range(2))
    assert first != second != third
    model, optimizer, _, path = saved(tmp_path, monkeypatch, epoch=1, batches=3, **begins)
    again = shuffling(kind)
    assert restore(model=model, optimizer=optimizer, loader=again, path=path) is not None
    assert [[batch.item() for (batch,) in again] for _ in range(2)] == [second[3:], third]


@pytest.mark.parametrize("kind", ["torch", "sampler"])
def test_before_an_epochs_first_batch_the_order_is_still_to_be_drawn(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of that batch had begun, and its random numbers are of behind the draw."""
    whole = shuffling(kind)
    list(whole)
    begins = {"rng_at_iter": RngState.capture(own_order.generators_of(whole)), "count_at_iter": own_order.count_of(whole)}
    second = [batch.item() for (batch,) in whole]
    model, optimizer, _, path = saved(tmp_path, monkeypatch, epoch=1, batches=0, rng=RngState.capture(), **begins)
    again = shuffling(kind)
    assert restore(model=model, optimizer=optimizer, loader=again, path=path) is not None
    assert [batch.item() for (batch,) in again] == second


@pytest.mark.parametrize("given", [{}, {"scaler": torch.amp.GradScaler("cpu", enabled=False)}])
def test_a_scaler_that_is_turned_off_may_be_named_or_not(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, loader, path = saved(tmp_path, monkeypatch, batches=3, rng_at_iter=RANDOM)
    assert restore(model=model, optimizer=optimizer, loader=loader, path=path, **given) is not None


def test_a_model_that_no_optimizer_trains_is_said_to_be_in_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An average of the model, say: it has the same names and shapes."""
    model, optimizer, loader, path = saved(tmp_path, monkeypatch, batches=3, rng_at_iter=RANDOM)
    with pytest.raises(
        RestoreError, match=r"has been taken by those before.*no optimizer trains \(an average, a teacher\) is in none of ours"
    ):
        restore(model=[model, torch.nn.Linear(2, 2)], optimizer=optimizer, loader=loader, path=path)


def test_a_place_that_a_loader_has_loaded_by_itself_is_not_gone_beyond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's `load_state()` gives torchdata's loader its own state; ours would have passed over as many batches once more."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    model, optimizer, _, path = saved(tmp_path, monkeypatch, batches=1, rng_at_iter=RANDOM)
    loader: Any = StatefulDataLoader(TensorDataset(torch.arange(4.0)), batch_size=1)
    begun = iter(loader)
    next(begun)
    state = loader.state_dict()
    loader = StatefulDataLoader(TensorDataset(torch.arange(4.0)), batch_size=1)
    loader.load_state_dict(state)
    assert restore(model=model, optimizer=optimizer, loader=loader, path=path) is not None
    assert [float(batch[0]) for batch in loader] == [1, 2, 3]


class OfOneRank:
    """A loader of a rank's own seed; `at_head`: it is set anew at the head of each epoch."""

    def __init__(self, rank: int, *, at_head: bool) -> None:
        self.rank, self.at_head, self.generator = rank, at_head, torch.Generator().manual_seed(40 + rank)
        self.loader: Any = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=1, shuffle=True, generator=self.generator)

    def epoch(self, number: int) -> list[float]:
        if self.at_head:
            self.generator.manual_seed(100 + 7 * number + self.rank)
        return [batch.item() for (batch,) in self.loader]


@pytest.mark.parametrize("at_head", [True, False], ids=["seeded at each head", "seeded once"])
@pytest.mark.parametrize("rank", [1, 0], ids=["another seed", "the same seed"])
def test_a_rank_that_shuffles_by_itself_keeps_its_order_where_that_is_known_or_is_told_whose_it_takes(
    rank: int, at_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has no part in the checkpoint, and had trained on the batches of the rank that has, in silence."""
    whole, saver = OfOneRank(rank, at_head=at_head), OfOneRank(0, at_head=at_head)
    mine = [whole.epoch(0), whole.epoch(1), whole.epoch(2)]
    theirs = [saver.epoch(0)]
    if at_head:
        saver.generator.manual_seed(107)
    begins = {"rng_at_iter": RngState.capture((saver.generator,))}
    theirs.append(saver.epoch(1))
    model, optimizer, _, path = saved(tmp_path, monkeypatch, epoch=1, batches=3, **begins)
    monkeypatch.setattr(RankFile, "of", staticmethod(lambda path, *_, **__: (RankFile.read(path, 0), False)))
    again = OfOneRank(rank, at_head=at_head)
    assert restore(model=model, optimizer=optimizer, loader=again.loader, path=path) is not None
    keeps = at_head or not rank
    assert again.epoch(1) == (mine if keeps else theirs)[1][3:]
    theirs.append(saver.epoch(2))
    assert (again.epoch(2) == theirs[2]) is not bool(rank)  # it takes the other's order for that one epoch only
    assert ("it shuffles its data by another seed than rank 0, which saved" in capfd.readouterr().err) is not keeps
