"""A vetoed update window leaves no trace but in the position of the loader."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from torch_watchdog_agent.checkpoint.fingerprint import all_finite, fingerprint
from torch_watchdog_agent.checkpoint.position import START
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.subjects import Subjects
from torch_watchdog_agent.checkpoint.window import WindowState

torch.set_num_threads(1)


class Counting(nn.Module):
    """Buffers of every kind: statistics, one that is written in place, one that is replaced, one that never changes, one that is large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4), persistent=False)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("table", torch.arange(8.0))
        self.register_buffer("large", torch.zeros(1 << 19))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += rows.sum(0)
        self.average = 0.9 * self.average + 0.1 * rows.mean(0)
        self.large[0] += 1
        return nn.functional.dropout(self.norm(self.linear(rows)), 0.5)


class Training:
    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Counting()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=2),
                torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1.0, 50),
            ],
            milestones=[2],
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.said: list[str] = []
        self.subjects = Subjects()
        self.subjects.optimizer_seen(self.optimizer)
        self.subjects.scheduler_seen(self.scheduler)
        self.subjects.scaler_seen(self.scaler)
        self.window = WindowState(self.subjects, say=self.said.append, **options)

    def step(self, *, vetoed: bool = False) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.rand(6, 4) + random.random()).sum()).backward()
        if vetoed:
            self.scaler.unscale_(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def state(self) -> list[Any]:
        buffers = [(name, tensor.tolist()) for name, tensor in self.model.named_buffers() if name != "large"]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        return [
            buffers,
            groups,
            repr(self.scheduler.state_dict()["last_epoch"]),
            self.scaler.state_dict(),
            random.getstate(),
            torch.get_rng_state().tolist(),
        ]


@pytest.mark.parametrize("steps_before", [1, 2, 3, 4, 5, 9])
def test_restore_brings_back_what_the_window_changed(steps_before: int) -> None:
    """After any number of windows, while learning which buffers change and later."""
    training = Training()
    for _ in range(steps_before):
        training.window.opened()
        training.step()
    training.window.opened()
    before = training.state()
    training.step(vetoed=True)
    assert training.state() != before
    training.window.restore()
    assert training.state() == before


def test_a_run_with_a_vetoed_window_goes_on_like_one_without_it() -> None:
    vetoed, plain = Training(), Training()
    for training, veto_at in ((plain, -1), (vetoed, 5)):
        torch.manual_seed(3)
        random.seed(3)
        for step in range(8):
            training.window.opened()
            if step == veto_at:
                training.step(vetoed=True)
                training.window.restore()
                training.window.opened()
            training.step()
    assert vetoed.state() == plain.state()
    assert [fingerprint(p) for p in vetoed.model.parameters()] == [fingerprint(p) for p in plain.model.parameters()]


def test_the_very_first_window_can_be_vetoed() -> None:
    training = Training()
    training.window.opened()
    before = training.state()
    training.step(vetoed=True)
    training.window.restore()
    assert training.state() == before


def test_a_scheduler_may_hold_the_model_and_count_nothing() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Warmup(torch.optim.lr_scheduler.LambdaLR):
        def __init__(self) -> None:
            self.model = model  # a module has a `_version`, as a tensor
            super().__init__(optimizer, lambda n: 1 / (n + 1))

    subjects, scheduler = Subjects(), Warmup()
    subjects.optimizer_seen(optimizer)
    subjects.scheduler_seen(scheduler)
    window = WindowState(subjects, say=print)
    window.opened()
    optimizer.step()
    scheduler.step()
    assert subjects.scheduled() == 1
    window.restore()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"], scheduler.model) == (0, 0.1, model)
    for odd in (None, float("nan"), "first"):
        scheduler.last_epoch = odd
        assert subjects.scheduled() == 0


def test_a_save_in_the_middle_of_a_window_sees_its_start_and_changes_nothing() -> None:
    training = Training()
    for _ in range(6):
        training.window.opened()
        training.step()
    training.window.opened()
    at_start = training.state()
    training.step(vetoed=True)
    at_gate = training.state()
    with training.window.rewound():
        assert training.state() == at_start
    assert training.state() == at_gate
    training.window.restore()
    assert training.state() == at_start


def test_a_buffer_too_large_to_keep_is_said_once() -> None:
    training = Training(max_buffer_bytes=1 << 20)
    for _ in range(7):
        training.window.opened()
        training.step()
    assert [line for line in training.said if "large" in line] == training.said and len(training.said) == 1


def test_a_window_before_anything_was_seen_keeps_the_generators() -> None:
    window = WindowState(Subjects(), say=print)
    window.restore()
    window.opened()
    first = torch.rand(())
    window.restore()
    assert torch.rand(()) == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_a_fingerprint_tells_one_changed_element_and_two_swapped_ones(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 0, 1, 1, 0, 0], dtype=dtype)
    changed, swapped = tensor.clone(), tensor.clone()
    changed[2] = 1
    swapped[[0, 1]] = tensor[[1, 0]]
    assert len({fingerprint(item) for item in (tensor, changed, swapped)}) == 3
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(torch.zeros((), dtype=dtype)) != fingerprint(torch.zeros(0, dtype=dtype))


def test_finite_looks_at_every_element_of_every_float() -> None:
    large = torch.zeros((1 << 20) + 3)
    assert all_finite([large, torch.zeros((), dtype=torch.bfloat16), torch.tensor([1]), torch.zeros(2, dtype=torch.float8_e5m2)])
    large[-1] = float("inf")
    assert not all_finite([torch.zeros(2), large])


# Python ahead of a device: a rescue goes back further than one window


def scheduled() -> tuple[Subjects, torch.optim.lr_scheduler.LambdaLR]:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    subjects = Subjects()
    subjects.optimizer_seen(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    subjects.scheduler_seen(scheduler)
    return subjects, scheduler


def test_the_state_of_some_windows_ago_is_seen_and_then_the_present_one_again() -> None:
    subjects, scheduler = scheduled()
    window = WindowState(subjects, say=print)
    for updates in range(20):
        window.opened(updates=updates)
        scheduler.optimizer.step()
        scheduler.step()
    assert [window.begun_after(updates) for updates in (20, 19, 18, 4, 3)] == [0, 1, 2, 16, 0]
    with window.rewound(2) as is_in_place:
        assert (scheduler.last_epoch, scheduler.optimizer.param_groups[0]["lr"]) == (18, 1 / 19)
        assert is_in_place()
    assert (scheduler.last_epoch, scheduler.optimizer.param_groups[0]["lr"]) == (20, 1 / 21)


def test_a_training_that_moves_on_while_its_state_is_saved_is_noticed() -> None:
    subjects, scheduler = scheduled()
    window = WindowState(subjects, say=print)
    window.opened(updates=1)
    with window.rewound() as is_in_place:
        scheduler.step()
        assert not is_in_place()


def test_a_state_read_in_the_middle_of_a_window_has_the_buffers_of_its_start_and_none_is_written() -> None:
    """As a rescue reads it behind a device that goes on with the window's forward."""
    training = Training()
    for updates in range(6):
        training.window.opened(updates=updates)
        training.step()
    training.window.opened(updates=6)
    at_start = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.step(vetoed=True)
    versions = [buffer._version for buffer in training.model.buffers()]
    assert training.window.why_no_buffers(6) == ""
    read = training.window.with_kept_buffers(lambda value: {name: tensor.clone() for name, tensor in value.items()})
    state = read(training.model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in at_start.items())
    assert not torch.equal(state["average"], training.model.average)
    assert [buffer._version for buffer in training.model.buffers()] == versions


def test_a_state_whose_buffers_cannot_all_be_had_is_refused_by_name() -> None:
    large, late = Training(max_buffer_bytes=1 << 20), Training()
    for updates in range(6):
        large.window.opened(updates=updates)
        large.step()
    assert "large" in large.window.why_no_buffers(5)
    for updates in range(5):
        late.window.opened(updates=updates)
    late.model.table += 1
    assert "table" in late.window.why_no_buffers(4)
    late.window.opened(updates=5)
    assert late.window.why_no_buffers(4) == "which of its model's buffers a step changes was learned only since"
    assert late.window.why_no_buffers(5) == ""


class Quietly(nn.Module):
    """Buffers that change without a sign of it, or cannot be written where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("codes", torch.zeros(1 << 19))
        self.register_buffer("mask", torch.ones(1).expand(8))
        self.register_buffer("never", torch.arange(4.0))
        with torch.inference_mode():
            self.register_buffer("fixed", torch.ones(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.average.data.mul_(0.9).add_(rows.mean(0))
        self.codes.data[:4] += rows.sum(0)
        self.mask = (self.mask[:1] + 1).expand(8)
        return self.linear(rows)


@pytest.mark.parametrize("steps_before", [0, 1, 3, 5, 9])
def test_buffers_that_show_no_sign_of_their_change_or_cannot_be_written_are_put_back_too(steps_before: int) -> None:
    torch.manual_seed(0)
    model = Quietly()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subjects = Subjects()
    subjects.optimizer_seen(optimizer)
    window = WindowState(subjects, say=print)
    for _ in range(steps_before):
        window.opened()
        model(torch.rand(6, 4)).sum().backward()
        optimizer.step()
    window.opened()
    names = [
        name for name, _ in model.named_buffers() if name != "codes" or steps_before >= 4
    ]  # a large one is kept once it is known to change
    before = {name: getattr(model, name).clone() for name in names}
    model(torch.rand(6, 4))
    assert not torch.equal(model.average, before["average"])
    with window.rewound():
        assert all(torch.equal(getattr(model, name), before[name]) for name in names)
    assert not torch.equal(model.average, before["average"])
    window.restore()
    assert {name: torch.equal(getattr(model, name), before[name]) for name in names} == dict.fromkeys(names, True)


def window_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> WindowState:
    subjects = Subjects()
    subjects.optimizer_seen(optimizer)
    subjects.model_seen(model)
    return WindowState(subjects, say=print)


def by_count(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.weight.add_(0.1)


def a_group_more(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize("change", [by_count, a_group_more])
def test_what_the_script_itself_changes_in_a_window_is_noticed_at_any_time(change: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = window_of(model, optimizer)
    for _ in range(20):
        window.opened()
        model(torch.ones(2, 4)).sum().backward()
        assert not window.changed_in_step()
        optimizer.step()
    window.opened()
    change(model, optimizer)
    assert window.changed_in_step()


def test_a_momentum_encoder_that_begins_late_is_noticed_by_count() -> None:
    """In no optimizer, and in the model: it is saved with it."""
    model = nn.ModuleDict({"query": nn.Linear(4, 4), "key": nn.Linear(4, 4).requires_grad_(False)})
    optimizer = torch.optim.SGD(model["query"].parameters(), lr=0.1)
    window = window_of(model, optimizer)
    for number in range(12):
        window.opened()
        model["query"](torch.ones(2, 4)).sum().backward()
        if number >= 8:
            assert not window.changed_in_step()
            with torch.no_grad():
                model["key"].weight.mul_(0.9)
            assert window.changed_in_step()
        window.hands.look(at_gate=True)
        optimizer.step()


def swapped(model: nn.Module) -> None:
    """An evaluation on averaged weights, as torch counts it."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.ones_like(param))


@pytest.mark.parametrize("evaluates_every", [100, 3])
@pytest.mark.parametrize("own_writes", [0, 2])
def test_an_evaluation_on_other_weights_is_not_taken_for_the_state_behind_an_update(own_writes: int, evaluates_every: int) -> None:
    """The loop's own writes behind its update, a clipping of weights say, belong to the step."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = window_of(model, optimizer)
    for number in range(13):
        window.opened()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        for written in range(own_writes):
            assert window.why_unusual(), (number, written)
            with torch.no_grad():
                model.weight.clamp_(-1, 1)
        if number % evaluates_every == 0:
            assert not window.why_unusual() or not number  # of the first step nobody knows what belongs to it
            swapped(model)
            assert window.why_unusual()
            swapped(model)
    assert not window.why_unusual()
    swapped(model)
    window.opened()  # as the first batch of an evaluation opens one in a loop that does not say that it evaluates
    assert "an evaluation on other weights" in window.why_odd()
    window.opened()
    assert not window.why_unusual()  # an update that is left out


def test_where_the_number_of_writes_differs_from_step_to_step_no_start_is_odd_and_behind_an_update_nothing_is_certain() -> None:
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = window_of(model, optimizer)
    for number in range(40):
        window.opened()
        assert not window.why_odd()
        optimizer.zero_grad()
        for layer in list(model)[: 1 + number * number % 7 % 3 + number % 2]:
            layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert "differs from step to step" in window.why_unusual()


def test_a_copy_of_every_third_step_may_be_still_to_come_behind_each_update() -> None:
    """A target network of the model: with as many writes as most steps have it is whole in most of them, and nothing tells in which."""
    model = nn.ModuleDict({"online": nn.Linear(4, 4), "target": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model["online"].parameters(), lr=0.1)
    window = window_of(model, optimizer)
    for number in range(9):
        window.opened()
        model["online"](torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert window.why_unusual() or number < 4
        if number % 3 == 2:
            with torch.no_grad():
                for param, online in zip(model["target"].parameters(), model["online"].parameters(), strict=True):
                    param.copy_(online)


def test_parameters_that_are_unfrozen_in_mid_training_are_another_habit_and_nothing_odd() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    window = window_of(model, optimizer)
    for number in range(9):
        window.opened()
        assert not window.why_odd()
        if number == 5:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert not window.why_unusual() or number in (0, 5, 6)


def flipped(values: torch.Tensor) -> None:
    values[0, 0].neg_()


def zeroed(values: torch.Tensor) -> None:
    values[values.abs() == values.abs().min()] = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [flipped, zeroed])
def test_a_small_change_of_one_element_in_many_is_seen(change: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(1000, 1000).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = window_of(model, optimizer)
    window.opened()
    window.hands.look()
    assert not window.hands.in_step
    change(model.weight.data)
    window.hands.look()
    assert window.hands.in_step == "weight"


@pytest.mark.parametrize("puts_back", [False, True])
def test_a_loop_that_changes_parameters_where_torch_does_not_count_it_is_learned_by_their_content(puts_back: bool) -> None:
    """Adversarial training puts them back before its update, a momentum encoder does not."""
    model = nn.ModuleDict({"query": nn.Linear(4, 4), "key": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model["query"].parameters(), lr=0.1)
    window = window_of(model, optimizer)
    for number in range(2):
        window.opened()
        window.hands.look()
        assert bool(window.hands.in_step) is bool(number)
        before = model["key"].weight.data.clone()
        model["key"].weight.data.mul_(0.9)
        model["query"](torch.ones(2, 4)).sum().backward()
        window.hands.look()
        assert window.hands.in_step == "key.weight" and "key.weight" in window.why_odd()
        if puts_back:
            model["key"].weight.data.copy_(before)
        window.hands.look(at_gate=True)
        assert window.hands.at_gate == ("" if puts_back else "key.weight")
        optimizer.step()


@pytest.mark.parametrize("updates", [1, 2, 20])
def test_what_a_loop_writes_behind_its_update_where_torch_does_not_count_it_is_learned_by_content(updates: int) -> None:
    """WGAN's clipping of weights: before it the state behind an update is none that any step begins with."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for clips in (True, False):
        window = window_of(model, optimizer)
        for number in range(6):
            window.opened()
            assert not window.why_odd()
            for _ in range(updates):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                window.hands.look(at_gate=True)
                optimizer.step()
                window.hands.updated()
            said = window.why_unusual()
            assert ("changes weight behind its update" in said) is (clips and updates < 20 and number > 0), number
            if clips:
                model.weight.data.clamp_(-0.01, 0.01)


def test_parameters_whose_content_cannot_be_looked_at_are_in_nobodys_way() -> None:
    model = nn.ModuleDict({"query": nn.Linear(4, 4), "lazy": nn.LazyLinear(4)})
    model.register_parameter("small", nn.Parameter(torch.zeros(4, dtype=torch.float8_e4m3fn), requires_grad=False))
    optimizer = torch.optim.SGD(model["query"].parameters(), lr=0.1)
    window = window_of(model, optimizer)
    for _ in range(5):
        window.opened()
        window.hands.look()
        window.hands.look(at_gate=True)
        optimizer.step()
        window.hands.updated()
    assert not window.why_odd() and not window.hands.at_gate and not window.hands.behind


@pytest.mark.parametrize("what", ["parameters", "buffers", "nothing"])
def test_behind_the_end_of_the_data_the_state_is_whole_until_it_is_written_to(what: str) -> None:
    """An evaluation on averaged weights, or a batch norm that is calibrated anew."""
    training = Training()
    for _ in range(3):
        training.window.opened()
        training.step()
    training.window.pass_ended(updates=3, place=START)
    assert not training.window.why_moved_on() and not training.window.is_on_other_weights()
    if what == "parameters":
        swapped(training.model)
    elif what == "buffers":
        training.model(torch.ones(2, 4))
    assert ("written to since its pass" in training.window.why_moved_on()) is (what != "nothing")
    assert training.window.is_on_other_weights() is (what != "nothing")


def test_what_was_kept_behind_an_update_is_what_its_next_window_begins_with_of_a_model_that_is_new_by_then_too() -> None:
    """A loop that feeds itself, whose second optimizer has stepped for the first time."""
    training = Training()
    training.window.opened()
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    training.subjects.optimizer_seen(second)
    training.window.keep_buffers(updates=1)
    drawn, was = RngState.capture(), other[1].running_mean.clone()
    other(torch.rand(6, 4))
    training.window.opened(updates=1, rng=drawn)
    with training.window.rewound():
        begins_with = torch.rand(6, 4)
        assert torch.equal(other[1].running_mean, was)
    drawn.restore()
    assert torch.equal(begins_with, torch.rand(6, 4))
    assert not torch.equal(other[1].running_mean, was)
