"""The guard over many model families: silent on clean batches, and right about bad ones."""

from __future__ import annotations

import pytest
import torch
from corruption import cell_changed, compared, seeded, taught
from guard_loop import Loop
from guard_zoo import FAMILIES, Bad, Family
from guard_zoo_counts import COUNTED
from guard_zoo_shapes import SHAPED


def taught_family(name: str, batches: int) -> tuple[Family, Loop, list]:
    family = made(name)
    return (family, *taught(family, batches))


def made(name: str) -> Family:
    torch.manual_seed(0)
    return FAMILIES[name]()


@pytest.mark.parametrize("name", FAMILIES)
def test_clean_batches_of_any_shape_raise_no_alarm(name: str) -> None:
    _, loop, seen = taught_family(name, 40)
    assert loop.said == []
    assert [one.violation for one in seen if one.violation is not None] == []
    assert [one.raised for one in seen if one.raised is not None] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_few_batches_are_traced_once_the_shapes_are_understood(name: str) -> None:
    _, _, seen = taught_family(name, 60)
    assert sum(one.checked.needs_trace for one in seen[30:]) <= 6


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bad_batch_is_named_before_its_operator_runs(name: str) -> None:
    family, loop, _ = taught_family(name, 40)
    for bad in family.bad:
        found = loop.step(bad.change(family.clean()))
        assert found.violation is not None, (name, bad.key, found.raised)
        assert found.violation.batch.key == bad.key, found.violation.summary


CORRUPTIBLE = [name for name, make in FAMILIES.items() if make().corrupt]


@pytest.mark.parametrize("name", CORRUPTIBLE)
def test_random_corruption_is_blamed_exactly_where_the_step_would_fail(name: str) -> None:
    outcome = compared(made(name), 40, clean=0, spoil=cell_changed)
    assert (outcome.alarms, outcome.blamed, outcome.missed) == ([], [], [])
    assert outcome.harmful + outcome.harmless + outcome.undecided == 40
    assert outcome.harmful


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CORRUPTIBLE)
def test_much_random_corruption_is_blamed_where_the_step_would_fail(name: str) -> None:
    outcome = compared(made(name), 400, clean=0, spoil=cell_changed)
    assert (outcome.alarms, outcome.blamed) == ([], [])
    assert len(outcome.missed) <= 8, outcome.missed[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_soak_of_clean_batches_is_silent_and_soon_costs_no_trace(name: str) -> None:
    family, loop, seen = taught_family(name, 60)
    seeded(family, 11)
    seen += [loop.step(family.clean()) for _ in range(140)]
    assert [one.violation for one in seen if one.violation is not None] == []
    assert [warning for one in seen for warning in one.checked.warnings] == []
    assert [one.raised for one in seen if one.raised is not None] == []
    assert loop.said == []
    assert sum(one.checked.needs_trace for one in seen[60:]) <= 4


class Corrected(torch.nn.Module):
    """Looks at its ids in Python first, and corrects what it cannot take: every alarm about them is needless."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x if int(x.max()) < 20 else x.clamp(max=19)).sum()


def test_a_guard_whose_alarms_are_not_confirmed_is_given_up() -> None:
    loop = Loop(Corrected(), lambda model, batch: model(batch["x"]).backward())
    clean, odd = {"x": torch.arange(20)}, {"x": torch.arange(5, 25)}
    seen = [loop.step({"x": (odd if n >= 6 and n % 2 else clean)["x"].clone()}) for n in range(40)]
    assert [one.violation for one in seen if one.violation is not None] == []
    needless = [one.checked.needs_trace for one in seen[6:] if int(one.checked.leaves["x"].max()) >= 20]
    assert needless[0]
    assert sum(needless) <= 4
    assert any(row["why"] == "its alarms were not confirmed" for row in loop.guard.contract()["opaque"])


def test_an_alarm_that_is_needless_once_in_a_while_does_not_cost_the_guard() -> None:
    loop = Loop(Corrected(), lambda model, batch: model(batch["x"]).backward())
    seen = [loop.step({"x": torch.arange(5, 25) if n % 1100 == 1099 else torch.arange(20)}) for n in range(4500)]
    assert [one.violation for one in seen if one.violation is not None] == []
    assert any(row["key"] == "x" and row["op"] == "embedding" for row in loop.guard.contract()["guarded"])


def test_every_family_with_an_index_has_bad_batches() -> None:
    assert {name for name, make in FAMILIES.items() if not make().bad} == {"through_python", "codebook"}
    assert set(FAMILIES) >= COUNTED | SHAPED
    assert all(isinstance(bad, Bad) for make in FAMILIES.values() for bad in make().bad)
