"""The training state is found without user code, and nothing is kept alive by being found."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from torch_watchdog_agent.checkpoint.subjects import Subjects

torch.set_num_threads(1)


class Wrapper(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def subjects_of(*optimizers: torch.optim.Optimizer) -> Subjects:
    subjects = Subjects()
    for optimizer in optimizers:
        subjects.optimizer_seen(optimizer)
    return subjects


def test_the_outermost_module_that_holds_the_parameters_is_the_model() -> None:
    outer = Wrapper(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    bystander = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    assert [id(model) for model in subjects_of(optimizer).models()] == [id(outer)]
    assert bystander is not None


def test_an_average_of_the_model_is_not_the_model() -> None:
    net = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert [id(model) for model in subjects_of(optimizer).models()] == [id(net)]
    assert average is not None


def test_two_networks_of_two_optimizers_come_in_the_optimizers_order() -> None:
    second, first = nn.Linear(3, 3), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    assert [id(model) for model in subjects_of(*optimizers).models()] == [id(first), id(second)]


def test_a_compiled_model_is_taken_out_of_its_wrapper() -> None:
    net = nn.Linear(2, 2)
    compiled = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    assert [id(model) for model in subjects_of(optimizer).models()] == [id(net)]


def test_a_wrapper_around_an_optimizer_is_not_a_second_one() -> None:
    class Prepared(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    prepared = Prepared(optimizer)
    assert [id(seen) for seen in subjects_of(prepared, optimizer).optimizers()] == [id(optimizer)]


def test_schedulers_inside_another_are_part_of_that_one() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    outer = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[2])
    subjects = Subjects()
    for scheduler in (*inner, outer):
        subjects.scheduler_seen(scheduler)
    assert list(subjects.schedulers()) == [outer]
    assert subjects.scheduled() == outer.last_epoch


def test_a_chained_scheduler_counts_by_those_that_it_steps() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    chained = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ConstantLR(optimizer)])
    subjects = Subjects()
    subjects.scheduler_seen(chained)
    before = subjects.scheduled()
    optimizer.step()
    chained.step()
    assert subjects.scheduled() == before + 1


def test_nothing_is_kept_alive() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    subjects = subjects_of(optimizer)
    subjects.model_seen(net)
    assert subjects.models()
    gone = weakref.ref(net)
    del net, optimizer
    gc.collect()
    assert gone() is None and subjects.models() == () and subjects.optimizers() == ()


def test_what_is_not_covered_is_named() -> None:
    assert any("EMA copies" in line for line in Subjects().not_covered())


def test_a_scaler_that_is_turned_off_is_no_state_that_must_be_handed_back() -> None:
    subjects = Subjects()
    scalers = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")
    for scaler in scalers:
        subjects.scaler_seen(scaler)
    assert subjects.scalers() == scalers[1:]
