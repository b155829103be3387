"""The rank's half of a rescue where the machine gives no thread, and where a save that an order had begun is still under way."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from part_of_a_rank import PartOfARank

from torch_watchdog_agent.checkpoint.position import Place
from torch_watchdog_agent.checkpoint.rank_file import RankFile
from torch_watchdog_agent.checkpoint.subjects import Subjects
from torch_watchdog_agent.checkpoint.window import WindowState
from torch_watchdog_agent.rescue import device, saving
from torch_watchdog_agent.rescue.looking import looked_at
from torch_watchdog_agent.rescue.rescuer import Rescuer
from torch_watchdog_proto.messages import Leave, Saved
from torch_watchdog_proto.rescue_words import Free, Freed, Rescue

FREE = Free(generation=7, reason="rank 1: it fell", exit_code=3)


class Rank(PartOfARank):
    """With a save that may be under way."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.saver = Saver()

    def tell(self, message: Any) -> bool:
        return super().tell((message, self.saver.ended))


def that_trains(folder: Path, *, device_gate: bool = False) -> Any:
    """A rank with a model, whose optimizer lives as long."""
    rank: Any = Rank(folder)
    rank.config.device_gate = device_gate
    rank.optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    rank.subjects = Subjects()
    rank.subjects.optimizer_seen(rank.optimizer)
    rank.window = WindowState(rank.subjects, say=rank.say)
    rank.quarantine = SimpleNamespace(lines=tuple)
    return rank


def freed_at_its_fetch(rank: Any) -> Rescuer:
    """It has said that it has come free, and waits for what it is to do."""
    rescuer = Rescuer(rank, leave=lambda: None)
    rescuer.at_gate(rank.optimizer)
    rescuer.after_gate(window_closed=False)
    rescuer.at_boundary(in_window=False)
    assert rescuer.takes(FREE)
    assert rank.heard.wait(20)
    rank.heard.clear()
    return rescuer


class Saver:
    """Busy until it has been looked at twice."""

    def __init__(self, looks: int = 0) -> None:
        self.left = looks

    @property
    def ended(self) -> bool:
        return self.left <= 0

    @property
    def busy(self) -> bool:
        self.left -= 1
        return self.left >= 0


def test_without_a_thread_the_rank_comes_free_at_once_and_says_that_it_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rank = Rank(tmp_path)
    rescuer = Rescuer(rank, leave=lambda: None)  # type: ignore[arg-type]
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert rescuer.takes(FREE)
    ((freed, _),) = rank.told
    assert isinstance(freed, Freed)
    assert (freed.holds, freed.updates_applied) == ("nothing", 5)
    assert "can't start new thread" in freed.why
    with pytest.raises(SystemExit) as left:
        rescuer.at_boundary(in_window=False)
    assert left.value.code == 3


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("rank 0 lost another: RuntimeError: closed by peer", "this rank lost another: RuntimeError: closed by peer"),
        ("rank 0: it fell", "this rank: it fell"),
        ("rank 1: it lost rank 0", "rank 1: it lost rank 0"),
    ],
)
def test_the_rank_that_is_told_is_not_named_as_another(tmp_path: Path, reason: str, told: str) -> None:
    rank = Rank(tmp_path)
    rescuer = Rescuer(rank, leave=lambda: None)  # type: ignore[arg-type]
    assert rescuer.takes(replace(FREE, reason=reason)) and rank.heard.wait(20)
    assert rank.said == [f"the training cannot go on ({told}): this rank applies no further update"]
    assert rescuer.why_alone() == f"the training cannot go on: {told}"
    assert rescuer.takes(Leave(generation=7))


def test_a_rank_that_loses_its_node_says_whether_the_training_goes_on(tmp_path: Path) -> None:
    rescuer = Rescuer(Rank(tmp_path), leave=lambda: None)  # type: ignore[arg-type]
    assert rescuer.what_now().startswith("training goes on")
    assert rescuer.takes(FREE)
    rescuer.lost()
    assert rescuer.what_now().startswith("the training cannot go on")


def test_a_save_that_an_order_had_begun_ends_before_the_rescue_may_write_under_its_name(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.saver = Saver(looks=2)
    rescuer = Rescuer(rank, leave=lambda: None)  # type: ignore[arg-type]
    rescuer.at_boundary(in_window=False)
    assert rescuer.takes(FREE)
    assert rank.heard.wait(20)
    ((freed, save_had_ended),) = rank.told
    assert isinstance(freed, Freed) and save_had_ended
    assert rescuer.takes(Leave(generation=7))


class Gate:
    """A device that has done all that was launched, five updates, and reads what it is asked for."""

    done, opened_last, is_between_updates, missed = 5, 5, True, False

    def before_update(self, number: int) -> None: ...
    def close(self) -> None: ...
    def open(self) -> None: ...

    def answers(self, parameter: Any) -> bool:
        return True

    def read(self, work: Any, *, within_s: float) -> Any:
        return work()

    def to_host(self, value: Any) -> Any:
        return value


@pytest.fixture(params=["cpu", "device"])
def state_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the state of `that_trains` is said to lie on. The device's gate is made by a rank's first update."""
    if request.param == "device":
        monkeypatch.setattr(device, "of_this_process", lambda parameter, shared: Gate())
        monkeypatch.setattr(device, "abort_groups", lambda say: None)
        monkeypatch.setattr("torch_watchdog_agent.rescue.rescuer.on_device", lambda state: True)
    return request.param


def test_a_batch_that_a_slow_loader_hands_over_once_the_rescue_has_begun_comes_again(tmp_path: Path, state_on: str) -> None:
    rank = that_trains(tmp_path, device_gate=state_on == "device")
    rescuer = freed_at_its_fetch(rank)
    rank.loop.handed_over()
    rank.window.opened(updates=5, place=Place(1, 7, None))
    left: list[object] = []

    def use() -> None:
        with pytest.raises(SystemExit) as ended:
            rescuer.at_hand_over(opens=True)
        left.append(ended.value.code)

    stands = threading.Thread(target=use, daemon=True)
    stands.start()
    assert rescuer.takes(Rescue(generation=7, path=str(tmp_path / "step-5"), reason=""))
    assert rank.heard.wait(60)
    saved, _ = rank.told[-1]
    assert isinstance(saved, Saved) and saved.error is None
    position = RankFile.read(tmp_path / "partial.step-5", 0).position
    assert (position.epoch, position.batches) == (1, 7)
    assert rescuer.takes(Leave(generation=7))
    stands.join(20)
    assert left == [3]


@pytest.mark.parametrize("opens", ["as it is to be saved", "as it is saved"])
def test_what_a_step_begins_with_is_on_hand_however_late_it_begins(
    opens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_on: str
) -> None:
    """To look at a large model takes a while in the first steps; and a place is read that counts a batch which the loop has not got yet."""
    rank = that_trains(tmp_path, device_gate=state_on == "device")
    rank.window.opened(updates=4, place=Place(1, 6, None))
    rank.place = lambda **_: Place(1, 8, None)
    rescuer = freed_at_its_fetch(rank)
    asked, begun = threading.Event(), threading.Event()

    def use() -> None:
        if opens == "as it is saved":
            assert asked.wait(20)
        rank.loop.handed_over()
        begun.set()
        assert asked.wait(20)
        rank.window.opened(updates=5, place=Place(1, 7, None))
        with pytest.raises(SystemExit):
            rescuer.at_hand_over(opens=True)

    stands = threading.Thread(target=use, daemon=True)
    stands.start()
    saves = saving._save

    def save(*args: Any, **kwargs: Any) -> Saved:
        saved = saves(*args, **kwargs)
        asked.set()
        assert begun.wait(20)
        return saved

    if opens == "as it is saved":
        monkeypatch.setattr(saving, "_save", save)
    else:
        assert begun.wait(20)
        monkeypatch.setattr(rescuer, "_until", lambda true, **_: (asked.set(), until(true)))
    until = Rescuer._until.__get__(rescuer)
    assert rescuer.takes(Rescue(generation=7, path=str(tmp_path / "step-5"), reason=""))
    assert rank.heard.wait(60)
    saved, _ = rank.told[-1]
    assert isinstance(saved, Saved) and saved.error is None
    position = RankFile.read(tmp_path / "partial.step-5", 0).position
    assert (position.epoch, position.batches) == (1, 7)
    assert rescuer.takes(Leave(generation=7))
    stands.join(20)


def test_a_batch_that_comes_while_a_device_that_is_behind_is_saved_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has done four of five updates; what its state is of is the window before the one that opens now."""
    gate = Gate()
    gate.done, gate.opened_last = 4, 5
    monkeypatch.setattr(device, "of_this_process", lambda parameter, shared: gate)
    monkeypatch.setattr(device, "abort_groups", lambda say: None)
    monkeypatch.setattr("torch_watchdog_agent.rescue.rescuer.on_device", lambda state: True)
    rank = that_trains(tmp_path, device_gate=True)
    rank.window.opened(updates=4, place=Place(1, 6, None))
    rescuer = freed_at_its_fetch(rank)
    saves, tried = saving._save, []

    def save(*args: Any, **kwargs: Any) -> Saved:
        if not tried:
            rank.loop.handed_over()
            rank.window.opened(updates=5, place=Place(1, 7, None))
            rescuer._standing = True
        tried.append(kwargs["windows_back"])
        return saves(*args, **kwargs)

    monkeypatch.setattr(saving, "_save", save)
    assert rescuer.takes(Rescue(generation=7, path=str(tmp_path / "step-4"), reason=""))
    assert rank.heard.wait(60)
    saved, _ = rank.told[-1]
    assert isinstance(saved, Saved) and saved.error is None and tried == [1, 2]
    position = RankFile.read(tmp_path / "partial.step-4", 0).position
    assert (position.epoch, position.batches) == (1, 6)
    assert rescuer.takes(Leave(generation=7))


def test_a_rank_that_has_failed_and_waits_for_a_word_is_not_said_to_be_elsewhere(tmp_path: Path) -> None:
    """Its own words tell where it was; a look may come a moment after them."""
    rescuer = Rescuer(Rank(tmp_path), leave=lambda: None)  # type: ignore[arg-type]
    rescuer._asked = True
    found: list[bool] = []

    def look() -> None:
        while "await_word" not in (seen := looked_at())[1]:
            pass
        found.append(seen[0])
        rescuer.lost()

    looking = threading.Thread(target=look)
    looking.start()
    rescuer.await_word()
    looking.join(20)
    assert found == [True]


@pytest.mark.parametrize("evaluates", [True, False])
def test_an_evaluation_is_no_boundary_for_what_belongs_to_the_update_before_it(evaluates: bool, tmp_path: Path) -> None:
    rank: Any = Rank(tmp_path)
    steps = 0
    rank.subjects.scheduled = lambda: steps
    rescuer = Rescuer(rank, leave=lambda: None)
    for _ in range(2):
        rescuer.at_boundary(in_window=False)
        rescuer.at_hand_over(opens=True)
        rescuer.at_gate(object())
        rescuer.after_gate(window_closed=True)
        steps += 1
    steps -= 1  # the scheduler follows the evaluation
    rescuer.at_boundary(in_window=False, trains=not evaluates)
    assert rescuer.is_half_done(trains=False) is evaluates  # no order is acted on there
    rescuer._standing = True  # the training thread has come to its next place
    assert rescuer.takes(FREE)
    assert rank.heard.wait(60)
    freed, _ = rank.told[0]
    assert isinstance(freed, Freed)
    assert ("its scheduler had not stepped yet" in freed.why) is evaluates
    assert rescuer.takes(Leave(generation=7))


def test_between_a_scaled_step_and_its_scaler_s_update_nothing_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_watchdog_agent.rescue.rescuer.SETTLE_S", 0.0)
    model = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    rank: Any = Rank(tmp_path)
    rank.subjects = Subjects()
    rank.subjects.optimizer_seen(optimizer)
    rank.subjects.scaler_seen(scaler)
    rank.window = WindowState(rank.subjects, say=rank.say)
    rescuer = Rescuer(rank, leave=lambda: None)
    for updated in (True, True, False):
        rank.window.opened(updates=5)
        rescuer.at_hand_over(opens=True)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        rescuer.at_gate(optimizer)
        scaler.step(optimizer)
        rescuer.after_gate(window_closed=True)
        if updated:
            scaler.update()
            optimizer.zero_grad()
    assert rescuer.takes(FREE)
    assert rank.heard.wait(20)
    ((freed, _),) = rank.told
    assert freed.holds == "nothing" and "loss scaler had not been updated" in freed.why
    assert rescuer.takes(Leave(generation=7))


@pytest.mark.parametrize(("ranks", "late", "waits"), [(1, False, True), (2, False, False), (2, True, True)])
def test_behind_the_data_ranks_wait_only_for_what_all_of_them_do(ranks: int, late: bool, waits: bool, tmp_path: Path) -> None:
    """One rank evaluates on other weights, say: it must not go on to a collective where the others save."""
    rank: Any = Rank(tmp_path)
    rank.identity.world_size = ranks
    rank.window.behind_data, rank.window.ended_late, rank.window.why_moved_on = True, late, lambda: "they were written to"
    assert Rescuer(rank, leave=lambda: None).is_half_done(trains=True) is waits
