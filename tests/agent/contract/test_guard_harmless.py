"""The guard never changes, breaks or slows a training: bit-identical results, fail open, clean after exceptions, torch.compile as it was."""

from __future__ import annotations

import copy
import io
import pickle
import random
import signal
import sys
from collections.abc import Callable
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from guard_loop import Loop
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from torch_watchdog_agent.contract import Guard
from torch_watchdog_agent.contract.mode import TraceMode, modes_on_stack
from torch_watchdog_agent.contract.tape import Tape
from torch_watchdog_agent.errors import BadBatchError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop, self.norm, self.head = nn.Embedding(50, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.drop(self.table(x).mean(1))))


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    F.cross_entropy(model(batch["x"]), batch["y"]).backward()


def batches(count: int = 8, rows: int = 6) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randint(0, 50, (rows, 4 + n % 3), generator=made), "y": torch.randint(0, 5, (rows,), generator=made)}
        for n in range(count)
    ]


def state_after(*, guarded: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, object, object]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = batches()
    if guarded:
        loop = Loop(model, step, optimizer)
        assert [one.violation for one in loop.train(data)] == [None] * len(data)
        assert loop.said == []
    else:
        for batch in data:
            step(model, batch)
            optimizer.step()
            optimizer.zero_grad()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.state_dict().values()], moments, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()


def test_a_clean_training_is_bit_identical_with_and_without_the_guard() -> None:
    plain, guarded = state_after(guarded=False), state_after(guarded=True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], guarded[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain[1], guarded[1], strict=True))
    assert torch.equal(plain[2], guarded[2])
    assert plain[3:] == guarded[3:]


def test_copies_of_the_model_that_come_and_go_are_no_other_program() -> None:
    """An average of the weights that is copied for each step: when it goes is the garbage collector's choice, and no reason to learn anew."""
    kept: list[nn.Module] = []

    def with_a_copy(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        kept[:] = [copy.deepcopy(model)]
        with torch.no_grad():
            kept[-1](batch["x"])
        step(model, batch)

    loop = Loop(Net(), with_a_copy)
    seen = loop.train(batches(24))
    assert not any(one.checked.needs_trace for one in seen[16:])
    bad = batches(1)[0]
    bad["x"][0, 0] = 50
    assert loop.step(bad).checked.violation is not None


def test_no_attribute_of_ours_is_left_on_a_tensor() -> None:
    data = batches(3)
    loop = Loop(Net(), step)
    loop.train(data)
    assert all(not vars(tensor) for batch in data for tensor in batch.values())
    copy.deepcopy(data)


def test_copies_pickles_and_saves_inside_a_traced_step_hold_the_plain_tensors() -> None:
    def copying(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        saved = io.BytesIO()
        torch.save({"batch": batch, "model": model.state_dict()}, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=True)["batch"]
        for made in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), loaded):
            assert all(type(made[key]) is torch.Tensor and torch.equal(made[key], batch[key]) for key in batch)
        step(copy.deepcopy(model), made)  # a teacher, on a copy of the batch
        step(model, batch)

    loop = Loop(Net(), copying)
    assert all(seen.violation is None and seen.raised is None for seen in loop.train(batches()))
    bad = batches(1)[0]
    bad["x"][1, 2] = 50
    assert loop.step(bad, go_on=False).violation is not None
    assert loop.said == []


def test_the_batch_is_never_changed() -> None:
    loop = Loop(Net(), step)
    loop.train(batches())
    bad = batches(1)[0]
    bad["x"][1, 2] = 50
    before = copy.deepcopy(bad)
    checked = loop.guard.fetched(bad, indices=None, worker=None)
    repaired = loop.guard.repaired(bad, checked)
    assert checked.violation is not None
    assert repaired is not None
    assert all(torch.equal(bad[key], before[key]) for key in bad)


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(64, 4), nn.Embedding(16, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.head((hidden * mask[..., None]).mean(1))


def stand_in(loop: Loop, bad: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    checked = loop.guard.fetched(bad, indices=None, worker=None)
    assert checked.violation is not None
    repaired = loop.guard.repaired(bad, checked)
    assert isinstance(repaired, dict)
    return repaired


def test_a_sequence_longer_than_the_table_of_positions_has_a_shorter_one_as_its_stand_in() -> None:
    """No value of its cells makes it fit: single processes had saved nothing for it, and no policy could skip it."""

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        nn.functional.cross_entropy(model(batch["x"], batch["mask"]), batch["y"]).backward()

    def made(length: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randint(64, (3, length)), "mask": torch.ones(3, length), "y": torch.tensor([0, 1, 2])}

    loop = Loop(Positioned(), step)
    loop.train([made(length) for length in (8, 12, 16, 5, 9)])
    bad = made(20)
    repaired = stand_in(loop, bad)
    assert {key: tuple(tensor.shape) for key, tensor in repaired.items()} == {"x": (3, 10), "mask": (3, 10), "y": (3,)}
    step(loop.model, repaired)
    assert bad["x"].shape == bad["mask"].shape == (3, 20)
    bad["x"][1, 2] = 64
    step(loop.model, stand_in(loop, bad))


class Described(Positioned):
    """With features of its own, as many as the longest of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(20, 4)

    def forward(self, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.head((self.words(x) + self.places(torch.arange(x.shape[1]))).mean(1) + self.features(features))


def test_a_dimension_that_always_was_as_long_is_not_cut_with_a_sequence_of_that_length() -> None:
    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        nn.functional.cross_entropy(model(batch["x"], batch["features"]), batch["y"]).backward()

    def made(length: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randint(64, (3, length)), "features": torch.randn(3, 20), "y": torch.tensor([0, 1, 2])}

    loop = Loop(Described(), step)
    loop.train([made(length) for length in (8, 12, 16, 5, 9)])
    repaired = stand_in(loop, made(20))
    assert {key: tuple(tensor.shape) for key, tensor in repaired.items()} == {"x": (3, 10), "features": (3, 20), "y": (3,)}
    step(loop.model, repaired)


def test_the_length_of_a_sequence_that_the_batch_holds_as_a_number_is_cut_with_it() -> None:
    def step(model: nn.Module, batch: dict[str, Any]) -> None:
        mask = torch.ones(3, batch["sizes"]["length"])
        nn.functional.cross_entropy(model(batch["x"], mask), batch["y"]).backward()

    def made(length: int) -> dict[str, Any]:
        return {"x": torch.randint(64, (3, length)), "y": torch.tensor([0, 1, 2]), "sizes": {"length": length, "rows": 3}}

    loop = Loop(Positioned(), step)
    loop.train([made(length) for length in (8, 12, 16, 5, 9, 7, 11, 13, 6, 10)])
    bad = made(20)
    repaired = stand_in(loop, bad)
    assert (repaired["x"].shape, repaired["sizes"], bad["sizes"]["length"]) == ((3, 10), {"length": 10, "rows": 3}, 20)
    step(loop.model, repaired)


def test_a_failure_inside_the_guard_turns_it_off_once_and_the_training_goes_on() -> None:
    loop = Loop(Net(), step)

    class Broken(dict):
        def items(self):
            raise OSError("a batch that cannot be read")

        keys = items

    for _ in range(3):
        checked = loop.guard.fetched(Broken(), indices=None, worker=None)
        assert checked.violation is None
        loop.guard.handed_over(checked, Broken())
        loop.guard.step_ended()
    assert len(loop.said) == 1
    assert "turned itself off" in loop.said[0]
    assert loop.step(batches(1)[0]).raised is None


def test_a_failure_while_recording_turns_the_guard_off_and_the_operator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenTape(Tape):
        def record(self, *args: object) -> None:
            raise KeyError("a bug of ours")

    monkeypatch.setattr("torch_watchdog_agent.contract.tracing.Tape", BrokenTape)
    loop = Loop(Net(), step)
    seen = loop.train(batches(3))
    assert [one.raised for one in seen] == [None] * 3
    assert len(loop.said) == 1
    assert modes_on_stack() == 0


def test_a_bad_batch_in_the_very_first_step_is_refused_inside_the_step() -> None:
    loop = Loop(Net(), step)
    bad = batches(1)[0]
    bad["y"][3] = 5
    seen = loop.step(bad)
    assert seen.checked.violation is None
    assert seen.refused is not None
    assert loop.refused == [seen.refused]
    assert (seen.refused.batch.key, seen.refused.batch.element, seen.refused.batch.value) == ("y", (3,), 5)


def test_the_refusal_is_a_runtime_error_whose_message_is_the_whole_diagnosis() -> None:
    model, said, refused = Net(), [], []
    guard = Guard(say=said.append, on_refused=refused.append)
    bad = batches(1)[0]
    bad["x"][1, 2] = 50
    guard.handed_over(guard.fetched(bad, indices=[7, 9, 11, 13, 15, 17], worker=None), bad)
    with pytest.raises(BadBatchError) as caught:
        step(model, bad)
    guard.step_ended()
    assert not isinstance(caught.value, IndexError)
    for word in ("x[1,2] = 50", "0..49", "embedding", "table", "test_guard_harmless.py", "index 9 of the data set", "cause:", "fix:"):
        assert word in str(caught.value)


def test_after_an_exception_of_the_training_the_next_batch_finds_everything_clean() -> None:
    loop = Loop(Net(), step)
    data = batches()

    def failing(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        model(batch["x"])
        raise ValueError("the user's own")

    loop.run = failing
    assert isinstance(loop.step(data[0]).raised, ValueError)
    assert modes_on_stack() == 0
    loop.run = step
    assert [one.violation for one in loop.train(data)] == [None] * len(data)
    assert loop.said == []


class LateError(RuntimeError):
    pass


def interrupted(at_call: int, work: Callable[[], object]) -> bool:
    """Does `work`, in whose so manieth call of Python code a signal comes, and its handler raises. False where it makes fewer."""
    calls = 0

    def handler(*_: object) -> None:
        raise LateError

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        if event == "call" and not frame.f_code.co_flags & CO_GENERATOR:  # of one that is closed Python itself swallows what it raises
            calls += 1
            if calls == at_call:
                signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, handler)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR2, before)
    return calls >= at_call


def test_what_a_signals_handler_raises_in_a_traced_step_arrives_and_leaves_all_as_it_was() -> None:
    torch.manual_seed(0)
    data = batches()
    Loop(Net(), step).train(data)  # what is imported in a first step is
    at_call, swallowed, changed = 1, [], []
    while True:
        loop = Loop(Net(), step)

        def work(loop: Loop = loop) -> None:
            loop.guard.handed_over(loop.guard.fetched(data[0], indices=None, worker=None), data[0])
            step(loop.model, data[0])
            loop.guard.step_ended()

        try:
            if not interrupted(at_call, work):
                break
            swallowed.append(at_call)
        except LateError:
            pass
        if not torch.is_grad_enabled() or loop.said:
            changed.append(at_call)
            torch.set_grad_enabled(True)
        assert [one.raised for one in loop.train(data[1:4])] == [None] * 3
        assert modes_on_stack() == 0, at_call
        at_call += 11
    assert at_call > 1000
    assert (swallowed, changed) == ([], [])


def test_nothing_is_traced_under_a_dispatch_mode_of_somebody_else() -> None:
    class Theirs(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    loop = Loop(Net(), step)
    with Theirs():
        loop.step(batches(1)[0])
        assert modes_on_stack() == 1
    assert modes_on_stack() == 0
    assert loop.guard.contract()["guarded"] == []


def test_a_mode_that_somebody_pushed_over_ours_delays_the_end_of_the_traced_step() -> None:
    class Theirs(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, guard = Net(), Guard(say=print, on_refused=print)
    batch = batches(1)[0]
    guard.handed_over(guard.fetched(batch, indices=None, worker=None), batch)
    with Theirs():
        step(model, batch)
        guard.step_ended()
        assert guard.tracing
    guard.step_ended()
    assert not guard.tracing
    assert modes_on_stack() == 0
    assert guard.contract()["guarded"]


def compiled_graphs(*, guarded: bool) -> int:
    torch._dynamo.reset()
    graphs: list[object] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = torch.compile(Net(), backend=backend, dynamic=True)
    loop = Loop(model, step)
    for batch in batches(8):
        loop.step(batch) if guarded else step(model, batch)
    torch._dynamo.reset()
    can_be_set_aside = hasattr(torch.compiler, "set_stance")  # torch 2.6
    assert len(loop.said) == (0 if can_be_set_aside or not guarded else 1)
    return len(graphs)


def test_torch_compile_compiles_as_many_graphs_as_without_us() -> None:
    assert compiled_graphs(guarded=True) == compiled_graphs(guarded=False) > 0


def test_evaluation_without_gates_does_not_trace_for_ever() -> None:
    model = Net()
    loop = Loop(model, lambda m, b: m(b["x"]))
    traced = []
    with torch.no_grad():
        for batch in batches(20):
            checked = loop.guard.fetched(batch, indices=None, worker=None)
            loop.guard.handed_over(checked, batch)
            model(batch["x"])
            traced.append(loop.guard.tracing)
    assert traced.count(True) < 10
    assert not traced[-1]


def test_a_gate_inside_backward_leaves_no_mode_behind_and_later_steps_teach_too() -> None:
    """An optimizer that updates each parameter as soon as its gradient is there: autograd brings back what was pushed when backward began."""
    torch.manual_seed(0)
    model = Net()
    loop = Loop(model, step)

    def update(parameter: torch.Tensor) -> None:
        loop.guard.step_ended()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    seen = loop.train(batches(8))
    assert modes_on_stack() == 0 and not loop.guard.tracing
    assert not seen[-1].checked.needs_trace
    bad = batches(1)[0]
    bad["x"][2, 1] = 77
    violation = loop.step(bad).checked.violation
    assert violation is not None and violation.batch.value == 77


def test_a_mode_is_pushed_only_while_a_step_is_traced() -> None:
    loop = Loop(Net(), step)
    loop.train(batches(10))
    checked = loop.guard.fetched(batches(1)[0], indices=None, worker=None)
    assert not checked.needs_trace
    assert not loop.guard.tracing


def test_tracing_holds_no_tensor_after_the_step() -> None:
    import gc
    import weakref

    loop = Loop(Net(), step)
    batch = batches(1)[0]
    alive = [weakref.ref(tensor) for tensor in batch.values()]
    loop.step(batch)
    assert isinstance(TraceMode, type)
    del batch
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
