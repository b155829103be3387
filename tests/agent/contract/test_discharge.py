"""Proofs over value sets must never be wrong: every proof is held against a replay on leaves drawn from the whole legal domain."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from guard_loop import Loop
from guard_zoo import FAMILIES
from torch import nn

from torch_watchdog_agent.contract.bounds import Range
from torch_watchdog_agent.contract.discharge import possible_values, value_sets
from torch_watchdog_agent.contract.frames import ModuleNames
from torch_watchdog_agent.contract.mode import TraceMode
from torch_watchdog_agent.contract.plan import plan_for
from torch_watchdog_agent.contract.recipe import cut
from torch_watchdog_agent.contract.replay import Program, instantiated
from torch_watchdog_agent.contract.signature import shapes_of, signature_of, structure_of
from torch_watchdog_agent.contract.tape import Tape

torch.set_num_threads(1)


def program_of(compute: Callable[[torch.Tensor], torch.Tensor], leaf: torch.Tensor) -> Program:
    """The recipe of what `compute` looks up in a table, ready to run."""
    tape, table = Tape(ModuleNames()), nn.Embedding(10_000, 1)
    mode = TraceMode(tape, lambda site, tensors, rows: None, lambda finding: None)
    tape.tag(0, "x", leaf)
    assert mode.push()
    table(compute(leaf))
    assert mode.pop()
    assert mode.failure is None
    shapes = {"x": tuple(leaf.shape)}
    recipe = cut(tape, tape.sites[-1], lambda batches: shapes)
    return Program(recipe, instantiated(recipe, {"x": leaf}, shapes))


COMPUTATIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x + 1,
    lambda x: x - x + 3,
    lambda x: x[..., 1] - x[..., 0] + 9,
    lambda x: x[..., :1] - x[..., 1:2] + 9,
    lambda x: x.flip(0) - x + 9,
    lambda x: (x != 1).long().cumsum(1) * (x != 1).long() + 1,
    lambda x: x.unbind(1)[0] - x.unbind(1)[1] + 9,
    lambda x: x.split(1, 1)[0] - x.split(1, 1)[1] + 9,
    lambda x: x.max(1).indices + x.max(1).values,
    lambda x: torch.where(x > 3, x, -x) + 9,
    lambda x: x.clamp(min=2) * 2,
    lambda x: x.masked_fill(x == 2, 7),
    lambda x: torch.nn.functional.pad(x, (0, 1), value=5)[..., 1:],
    lambda x: x.sort(1).indices,
    lambda x: torch.cat([x, x + 4], 1).roll(1, 1) - 0,
    lambda x: (x * 3) // 2,
    lambda x: x.remainder(3) + x.sum(1, keepdim=True),
    lambda x: torch.arange(x.shape[1])[None].expand_as(x) + x.argmax(1, keepdim=True),
]


def shifted_in_place(x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(x.shape)
    made[:, 1:] = x[:, :-1].clone()
    made[:, 0] = 6
    return made.masked_fill_(made == 1, 8)


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[:, 0] -= 1
    made += 1
    return made - x + 9


@pytest.mark.parametrize("number", range(len(COMPUTATIONS) + 2))
def test_no_value_of_a_replay_is_outside_its_set(number: int) -> None:
    compute = [*COMPUTATIONS, shifted_in_place, written_through_a_view][number]
    allowed = Range(low=0, high=8)
    torch.manual_seed(number)
    leaf = torch.randint(0, 9, (3, 4))
    program = program_of(compute, leaf)
    possible = possible_values(program, {"x": value_sets(leaf, [allowed])})
    if possible is None:
        return  # nothing is claimed
    for _ in range(200):
        (values,) = program.run({"x": torch.randint(0, 9, leaf.shape)})
        assert bool(torch.isin(values, possible).all())


def test_most_of_these_computations_have_a_rule() -> None:
    leaf = torch.randint(0, 9, (3, 4))
    sets = {"x": value_sets(leaf, [Range(low=0, high=8)])}
    known = [possible_values(program_of(compute, leaf), sets) is not None for compute in COMPUTATIONS]
    assert sum(known) >= 15


def fuzzed(name: str, rounds: int) -> tuple[int, int]:
    """(proofs held against a replay, wrong ones) for a model family, leaves drawn from the whole domain that their own checks allow."""
    torch.manual_seed(0)
    random.seed(0)
    family = FAMILIES[name]()
    loop = Loop(family.model, family.step)
    for _ in range(30):
        loop.step(family.clean())
    contract, proofs, wrong = loop.guard._contract, 0, 0
    for _ in range(rounds):
        batch = family.clean()
        structure = structure_of(signature_of(batch, loop.guard._names.training(), ()))
        plan = plan_for(contract.usable(structure), batch, shapes_of(batch))
        for key, leaf in batch.items():
            ranges = [check.allowed for check in plan.by_leaf.get(key, ()) if check.rule.kind == "range"]
            values = value_sets(leaf, ranges)
            if values is not None and leaf.numel():
                ends = values[[0, -1]]
                pool = ends if random.random() < 0.5 else values
                leaf.copy_(pool[torch.randint(0, len(pool), leaf.shape)])
        for check in plan.proved:
            (values,) = check.program.run(batch)
            proofs += 1
            wrong += bool(
                ((values < check.allowed.low) | (values > check.allowed.high)).logical_and(values != (check.allowed.ignored or -1)).any()
            )
    return proofs, wrong


@pytest.mark.parametrize("name", ["layoutlmv3", "roberta", "bart"])
def test_a_proved_rule_is_never_broken_by_a_legal_batch(name: str) -> None:
    proofs, wrong = fuzzed(name, 30)
    assert proofs > 0
    assert wrong == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", ["layoutlmv3", "layoutlm", "roberta", "bart", "gpt2", "gpt2_classifier", "llama", "t5", "labels_made_in_the_loop"]
)
def test_thousands_of_proofs_are_never_wrong(name: str) -> None:
    assert fuzzed(name, 300)[1] == 0
