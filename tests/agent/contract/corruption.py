"""Batches spoiled at random, and what the guard says of each against the truth: whether the step without a guard raises.

Knows families (guard_zoo) and loops (guard_loop); who runs it, and what is made of the counts, is not its concern.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from guard_loop import Loop, Seen
from guard_zoo import Batch, Family

from torch_watchdog_agent.contract.flatten import leaves_of, replaced

__all__ = ["Outcome", "cell_changed", "compared", "seeded", "spoiled", "taught"]

INTEGERS = (
    *(-(2**40), -101, -100, -99, -2, -1, 0, 1, 2, 3, 5, 6, 10, 11, 12, 19, 20, 30, 40, 49, 50, 63, 64, 66, 67, 69, 70, 96, 97, 98),
    *(254, 255, 1023, 1024, 5000, 2**31, 2**40),
)
BYTES, FLOATS = (0, 5, 6, 254, 255), (-0.01, 0.0, 0.5, 1.0, 1.006, 2.0)


@dataclass
class Outcome:
    """What became of one family. `harmful` and `caught` count by how; `blamed` and `missed` say what was wrong."""

    clean: int = 0
    alarms: list[str] = field(default_factory=list)
    harmless: int = 0
    caught: Counter[str] = field(default_factory=Counter)
    blamed: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    undecided: int = 0  # the truth is not whether it raises: memory that a CPU reads past its end, a mean over nothing

    @property
    def harmful(self) -> int:
        return sum(self.caught.values()) + len(self.missed)


def seeded(family: Family, seed: int) -> Family:
    torch.manual_seed(seed)
    random.seed(seed)
    return family


def taught(family: Family, batches: int) -> tuple[Loop, list[Seen]]:
    """A guard that has seen this many clean batches of the family."""
    seeded(family, 0)
    loop = Loop(family.model, family.step)
    return loop, [loop.step(family.clean()) for _ in range(batches)]


def cell_changed(family: Family) -> Batch:
    """A clean batch with one cell changed at random."""
    batch = family.clean()
    floats = family.name in ("binned", "bags")
    leaves = {key: leaf for key, leaf in leaves_of(batch).items() if leaf.numel() and (not leaf.is_floating_point() or floats)}
    tensor = leaves[random.choice(list(leaves))]
    values: tuple[float, ...] = INTEGERS if tensor.dtype == torch.int64 else BYTES if tensor.dtype == torch.uint8 else FLOATS
    tensor[tuple(random.randrange(length) for length in tensor.shape)] = random.choice(values)
    return batch


def spoiled(family: Family) -> Batch:
    """A clean batch that is wrong at random in one of the ways that data sets and collations get wrong."""
    ways: list[tuple[Callable[[Family], Batch], float]] = [(cell_changed, 6), (_row_changed, 2), (_resized, 1), (_retyped, 1)]
    return random.choices([way for way, _ in ways], [weight for _, weight in ways])[0](family)


def _any_leaf(batch: Batch) -> tuple[str, torch.Tensor]:
    leaves = leaves_of(batch)
    return random.choice([(key, leaf) for key, leaf in leaves.items() if leaf.dim() and leaf.numel()])


def _row_changed(family: Family) -> Batch:
    """Every value of one sample moved by as much: another vocabulary, classes that begin at 1, another scale."""
    batch = family.clean()
    integers = [leaf for leaf in leaves_of(batch).values() if leaf.dtype == torch.int64 and leaf.dim() and leaf.numel()]
    if not integers:
        return cell_changed(family)
    tensor = random.choice(integers)
    tensor[random.randrange(tensor.shape[0])] += random.choice((-3, -1, 1, 2, 7, 100, 1000))
    return batch


def _resized(family: Family) -> Batch:
    """One tensor is shorter or longer along one dimension than the others fit."""
    batch = family.clean()
    key, leaf = _any_leaf(batch)
    dim = random.randrange(leaf.dim())
    length = leaf.shape[dim]
    other = leaf.narrow(dim, 0, max(1, length - random.randint(1, 3))) if random.random() < 0.5 else torch.cat([leaf, leaf], dim)
    return replaced(batch, {key: other.clone()})


def _retyped(family: Family) -> Batch:
    batch = family.clean()
    key, leaf = _any_leaf(batch)
    return replaced(batch, {key: leaf.float() if leaf.dtype == torch.int64 else leaf.long()})


def _fails(family: Family, batch: Batch, model: Any) -> BaseException | None:
    """The truth."""
    try:
        family.step(model, batch)
    except Exception as error:
        return error
    return None


def _undecided(seen: Seen) -> bool:
    """Bags that run backwards (no CPU says so, memory is read past its end, and the process may be gone), and a mean over nothing, which is NaN."""
    found = seen.violation
    if found is None:
        return False
    return found.kind == "batch.empty" or (found.batch.key in ("offsets", "ends") and "before it" in found.cause)


def compared(family: Family, rounds: int, *, clean: int, spoil: Callable[[Family], Batch] = spoiled, teach: int = 60) -> Outcome:
    """`clean` batches in which nothing may be said, then `rounds` that are spoiled at random."""
    loop, seen = taught(family, teach)
    seen += [loop.step(family.clean()) for _ in range(max(0, clean - teach))]
    outcome = Outcome(clean=len(seen))
    outcome.alarms += [one.violation.summary for one in seen if one.violation is not None]
    outcome.alarms += [warning.summary for one in seen for warning in one.checked.warnings]
    outcome.alarms += [f"{type(one.raised).__name__} in a clean step" for one in seen if one.raised is not None]
    seeded(family, 7)
    for _ in range(rounds):
        _compare_one(family, loop, spoil(family), outcome)
    outcome.alarms += loop.said
    return outcome


def _forget(guard: Any, seen: Any, contract: Any) -> None:
    """A job ends with its first failure: each of them meets a guard that has seen clean batches only, and traces nothing of the one before."""
    guard._tracer.abandon()  # a batch that failed before anything had read it waits for a step of its own, under a mode that would see the truth, too
    guard._seen = seen
    contract.version = guard._contract.version + 1  # whatever was prepared is prepared anew
    for part in fields(contract):
        setattr(guard._contract, part.name, getattr(contract, part.name))


def _compare_one(family: Family, loop: Loop, batch: Batch, outcome: Outcome) -> None:
    before, again, model = copy.deepcopy(leaves_of(batch)), copy.deepcopy(batch), copy.deepcopy(family.model)
    guard = loop.guard
    usual, contract = copy.deepcopy(guard._seen), copy.deepcopy(guard._contract)
    seen = loop.step(batch)
    _forget(guard, usual, contract)
    if seen.checked.violation is not None:
        assert all(torch.equal(leaf, before[key]) for key, leaf in leaves_of(batch).items()), "the check changed the batch"
    if _undecided(seen):
        outcome.undecided += 1
        return
    error, found = _fails(family, again, model), seen.violation
    if found is not None and error is None:
        outcome.blamed.append(found.summary)
    elif found is not None:
        outcome.caught["held" if seen.checked.violation is not None else "refused" if seen.refused is not None else "named"] += 1
    elif error is not None:
        outcome.missed.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
    else:
        outcome.harmless += 1
