"""Runs schedules: the same seed always gives the same plan and the same run. `python tests/sim/driver.py COUNT [FIRST_SEED]` prints what fails, shrunk."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from multiprocessing import Pool
from typing import Any

from invariants import violated
from plan import Plan, draw, shrink
from world import World

__all__ = ["Failure", "first_failing", "problem_of", "run_all"]

_PIECE = 2000
_TRIES = 20  # seeds of the network for a smaller plan: with fewer events the old one deals other cards


@dataclass(frozen=True)
class Failure:
    """`plan` under `network_seed` fails with `problem`; it was made smaller from the plan of `seed`."""

    seed: int
    plan: Plan
    network_seed: int
    problem: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.problem}\nsmallest: World({self.plan}, {self.network_seed})"


def problem_of(plan: Plan, seed: int, **halves: Any) -> str | None:
    """What goes wrong in this run, or None."""
    world = World(plan, seed, **halves)
    try:
        return violated(world.run())
    except AssertionError as error:
        return str(error)


def first_failing(first: int, count: int, **halves: Any) -> Failure | None:
    """The first of these seeds under which a property does not hold."""
    for seed in range(first, first + count):
        problem = problem_of(draw(seed), seed, **halves)
        if problem is not None:
            return _shrunk(seed, problem, halves)
    return None


def _shrunk(seed: int, problem: str, halves: dict[str, Any]) -> Failure:
    name = problem[:2]

    def failing_seed(plan: Plan) -> int | None:
        seeds = (seed, *range(_TRIES))
        return next((one for one in seeds if (problem_of(plan, one, **halves) or "").startswith(name)), None)

    plan = shrink(draw(seed), lambda smaller: failing_seed(smaller) is not None)
    network_seed = failing_seed(plan)
    assert network_seed is not None
    return Failure(seed, plan, network_seed, problem_of(plan, network_seed, **halves) or problem)


def run_all(first: int, count: int) -> Failure | None:
    """The same on all cores, in pieces."""
    pieces = [(seed, min(_PIECE, first + count - seed)) for seed in range(first, first + count, _PIECE)]
    if len(pieces) == 1:
        return first_failing(first, count)
    with Pool() as pool:
        return next((failure for failure in pool.starmap(first_failing, pieces, chunksize=1) if failure is not None), None)


if __name__ == "__main__":
    count = int(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 40)
    began = time.monotonic()
    failure = run_all(first, count)
    took = time.monotonic() - began
    print(failure or f"{count} schedules from seed {first} hold, {count / took:.0f} a second")
    sys.exit(failure is not None)
