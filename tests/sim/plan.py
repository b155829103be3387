"""What happens to a simulated job: a plan drawn from a seed, and how a failing one is made smaller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, TypeAlias

__all__ = ["Fault", "Plan", "draw", "shrink"]

Kind: TypeAlias = Literal[
    "bad",  # rank is handed a bad batch for step `at`
    "stop",  # at time `at` an operator asks for a clean stop
    "checkpoint",  # ... for a checkpoint without a stop
    "leave",  # ... for a stop without a checkpoint
    "cancel",  # at time `at` somebody takes the order back
    "kill",  # rank dies at time `at`
    "kill_at_word",  # rank dies right before its word number `at` is sent
    "mute",  # rank's control thread does not answer from time `at` on, for a while
    "hooks_off",  # from time `at` on rank does not know how far it is, and promises nothing
    "broken_save",  # rank cannot write its part
    "not_finite",  # rank's part holds NaN
    "daemon_dies",  # before it has sent its word number `at`
    "daemon_back",  # at time `at`, where it has died: a new one, and the node processes say their hellos again
    "cut",  # at time `at` the line between rank's node and the daemon breaks: all in flight is lost; hellos again later
    "node_dies",  # at time `at` rank's node process dies: the rank goes on without us
    "store_dies",  # at time `at`
    "restart",  # at time `at` the launcher starts all ranks anew
]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens."""

    kind: Kind
    at: float
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """`delays`: of a message, drawn evenly. `loss`, `repeat`, `reorder`: their chance for each message. `ahead`: loops that fetch one batch ahead."""

    world: int
    steps: int
    faults: tuple[Fault, ...] = ()
    policy: Literal["stop", "skip"] = "stop"
    delays: tuple[float, ...] = (0.0, 0.0, 0.1, 0.5, 2.0)
    loss: float = 0.0
    repeat: float = 0.1
    reorder: float = 0.0
    coupled: bool = True
    evaluation_after: int | None = None  # step
    ahead: bool = False

    def of(self, kind: Kind) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.faults if fault.kind == kind)


_DELAYS = ((0.0,), (0.0, 0.0, 0.1, 0.5, 2.0), (0.0, 0.0, 0.1, 0.5, 2.0), (0.05, 1.0, 4.0, 9.0))
_NUM_FAULTS = (0, 1, 1, 2, 2, 3, 4)
_KINDS: tuple[Kind, ...] = (
    *("bad",) * 8, *("stop",) * 5, *("checkpoint",) * 4, *("cancel",) * 2, "leave", "kill", "kill_at_word", "kill_at_word", "mute", "hooks_off",
    "broken_save", "not_finite", "daemon_dies", "daemon_dies", "cut", "cut", "node_dies", "store_dies", "restart",
)  # fmt: skip


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    random = Random(seed)
    world, steps = random.choice((1, 2, 2, 3, 4)), random.randint(1, 6)
    faults = tuple(_fault(random, world, steps) for _ in range(random.choice(_NUM_FAULTS)))
    if any(fault.kind == "daemon_dies" for fault in faults) and random.random() < 0.6:
        faults += (Fault("daemon_back", random.uniform(1.0, 15.0)),)
    wild = random.random() < 0.25
    return Plan(
        world, steps, faults, policy=random.choice(("stop", "skip")), delays=random.choice(_DELAYS), loss=0.1 if wild else 0.0,
        reorder=0.2 if wild else 0.0, repeat=random.choice((0.0, 0.1, 0.4)), coupled=random.random() > 0.1,
        evaluation_after=random.randrange(steps) if random.random() < 0.2 else None, ahead=random.random() < 0.2,
    )  # fmt: skip


def _fault(random: Random, world: int, steps: int) -> Fault:
    kind, rank = random.choice(_KINDS), random.randrange(world)
    if kind == "bad":
        return Fault(kind, random.randrange(steps), rank)
    if kind == "kill_at_word":
        return Fault(kind, random.randint(1, 8), rank)
    if kind == "daemon_dies":
        return Fault(kind, random.randint(1, 8 * world), rank)
    return Fault(kind, random.uniform(0.0, 1.2 * steps), rank)


_CALM: tuple[tuple[str, Any], ...] = (
    *(("loss", 0.0), ("reorder", 0.0), ("repeat", 0.0), ("delays", (0.0,))),
    *(("evaluation_after", None), ("ahead", False), ("coupled", True)),
)


def shrink(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """A plan that still fails, and of which nothing more can be left out."""
    found = True
    while found:
        found = False
        for smaller in _smaller(plan):
            if fails(smaller):
                plan, found = smaller, True
                break
    return plan


def _smaller(plan: Plan) -> list[Plan]:
    without = [replace(plan, faults=plan.faults[:place] + plan.faults[place + 1 :]) for place in range(len(plan.faults))]
    calmer = [replace(plan, **{name: calm}) for name, calm in _CALM if getattr(plan, name) != calm]
    shorter = [replace(plan, steps=plan.steps - 1)] if plan.steps > 1 + max((f.at for f in plan.of("bad")), default=0) else []
    narrower = [replace(plan, world=plan.world - 1)] if plan.world > 1 and all(f.rank < plan.world - 1 for f in plan.faults) else []
    return [*without, *narrower, *shorter, *calmer]
