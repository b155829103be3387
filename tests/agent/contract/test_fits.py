"""Lengths that tensors of a batch always had in common: who breaks them, and what is said where the step then fails."""

from __future__ import annotations

import pytest
import torch
from guard_loop import Loop
from torch import nn

from torch_watchdog_agent.contract.fits import Fits, Unfit


def batch(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(shape, dtype=torch.int64) for key, shape in shapes.items()}


def learned(*batches: dict[str, torch.Tensor]) -> Fits:
    fits = Fits()
    for _ in range(2):
        for one in batches:
            fits.took(one)
    return fits


FITTING = (
    batch(ids=(2, 8), mask=(2, 8), labels=(2,)),
    batch(ids=(2, 9), mask=(2, 9), labels=(2,)),
    batch(ids=(3, 7), mask=(3, 7), labels=(3,)),
)


def test_the_tensor_that_breaks_most_is_blamed_and_held_against_the_one_it_is_most_like() -> None:
    fits = learned(*FITTING)
    assert fits.unfit(batch(ids=(2, 8), mask=(2, 6), labels=(2,))) == Unfit(key="mask", dim=1, other="ids", other_dim=1)
    assert fits.unfit(batch(ids=(2, 8), mask=(2, 8), labels=(1,))) == Unfit(key="labels", dim=0, other="ids", other_dim=0)
    assert fits.unfit(batch(ids=(2, 8), mask=(2,), labels=(2,))) == Unfit(key="mask", dim=1, other="ids", other_dim=1)


def test_new_lengths_that_all_share_and_a_missing_tensor_break_nothing() -> None:
    fits = learned(*FITTING)
    assert fits.unfit(batch(ids=(5, 30), mask=(5, 30), labels=(5,))) is None
    assert fits.unfit(batch(ids=(5, 30), labels=(5,))) is None


def test_what_was_equal_by_chance_is_not_expected_any_more_once_it_was_not() -> None:
    fits = learned(batch(ids=(2, 8), boxes=(2, 8, 4)), batch(ids=(4, 4), boxes=(4, 8, 4)))
    assert fits.unfit(batch(ids=(3, 5), boxes=(3, 8, 4))) is None


def test_a_length_that_never_was_another_is_missed_where_one_tensor_has_it_no_more() -> None:
    images = (batch(x=(4, 3, 8, 8), y=(4,)), batch(x=(2, 3, 10, 8), y=(2,)))
    fits = learned(*images)
    assert fits.unfit(batch(x=(4, 1, 8, 8), y=(4,))) == Unfit(key="x", dim=1, usual=3)
    assert fits.unfit(batch(x=(4,), y=(4,))) == Unfit(key="x", dim=1, usual=3)
    assert fits.unfit(batch(x=(4, 3, 9, 8), y=(4,))) is None
    both = learned(batch(x=(4, 3), z=(6, 5)), batch(x=(2, 3), z=(7, 5)))
    assert both.unfit(batch(x=(3, 4), z=(6, 1))) is None, "either may be the wrong one"


def test_of_two_that_do_not_fit_the_one_is_blamed_that_is_not_as_it_always_was() -> None:
    fits = learned(batch(x=(4, 3), y=(1, 3)), batch(x=(2, 3), y=(1, 3)))
    assert fits.unfit(batch(x=(4, 6), y=(1, 3))) == Unfit(key="x", dim=1, other="y", other_dim=1)


def test_nothing_is_expected_of_the_first_batches() -> None:
    fits = Fits()
    fits.took(FITTING[0])
    assert fits.unfit(batch(ids=(2, 8), mask=(2, 6), labels=(2,))) is None


class Summed(nn.Module):
    """The operator that fails gets neither tensor as the batch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return (self.one(x) + self.other(y)).sum() + length.sum()


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    model(**batch).backward()


def clean(rows: int = 4) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 3), "y": torch.randn(rows, 3), "length": torch.ones(rows)}


def test_an_exception_about_a_shape_names_the_tensor_that_has_another_length_than_it_always_had() -> None:
    loop = Loop(Summed(), step)
    for rows in (4, 5, 4, 6, 4, 3):
        assert loop.step(clean(rows), go_on=False).violation is None
    found = loop.step({**clean(4), "y": torch.randn(2, 3)}).violation
    assert found is not None
    assert (found.kind, found.batch.key, found.summary) == ("batch.shape", "y", "y (2, 3) does not fit x (4, 3)")


def test_an_exception_about_a_shape_names_the_tensor_that_has_not_the_features_that_it_always_had() -> None:
    loop = Loop(nn.Linear(3, 2), lambda model, batch: model(batch["x"]).sum().backward())
    for rows in (4, 5, 4, 6, 4, 3):
        assert loop.step({"x": torch.randn(rows, 3)}, go_on=False).violation is None
    found = loop.step({"x": torch.randn(4, 6)}).violation
    assert found is not None
    assert (found.kind, found.batch.key, found.summary) == ("batch.shape", "x", "x has shape (4, 6); dimension 1 of it always was 3")


@pytest.mark.parametrize("how", ["by key", "by name", "by keyword"])
def test_a_tensor_that_only_this_batch_lacks_is_named_where_the_step_fails_for_want_of_it(how: str) -> None:
    def run(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        if how == "by keyword":
            step(model, batch)
        else:
            model(batch["x"], batch["y"] if how == "by key" else batch.get("y").clone(), batch["length"]).backward()

    loop = Loop(Summed(), run)
    for rows in (4, 5, 4, 6, 4, 3):
        assert loop.step(clean(rows), go_on=False).violation is None
    made = clean()
    del made["y"]
    found = loop.step(made).violation
    assert found is not None
    assert (found.kind, found.batch.key, found.summary) == ("batch.shape", "y", "y is not in this batch; every batch before had it")


def test_a_tensor_that_is_only_sometimes_there_is_not_missed() -> None:
    fits = learned(*FITTING, batch(ids=(2, 8), mask=(2, 8)))
    assert fits.lacks(batch(ids=(2, 8), mask=(2, 8))) == ()
    assert fits.lacks(batch(ids=(2, 8), labels=(2,))) == ("mask",)


def test_an_exception_about_a_dtype_names_the_tensor_that_has_another_dtype_than_it_always_had() -> None:
    loop = Loop(Summed(), step)
    for _ in range(5):
        assert loop.step(clean(), go_on=False).violation is None
    found = loop.step({**clean(), "y": torch.randn(4, 3).double()}).violation
    assert found is not None
    assert (found.kind, found.batch.key, found.batch.dtype) == ("batch.dtype", "y", "float64")
    assert "it always was float32" in found.summary
