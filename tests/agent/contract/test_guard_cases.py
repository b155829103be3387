"""The public failure cases whose fault is in the batch, and their controls, one rank in this process: caught and every field right, or silent."""

from __future__ import annotations

import pytest
from case_runner import CASES, expected_of, run_case, scored

# The rest of the cases is the product's: those that only a comparison of ranks shows, those inside the model, and those that accelerate shards.
NOT_HERE = {"p26-half-precision-overflow", "p37-skip-on-one-rank", "p38-gather-different-lengths"}
NOT_HERE |= {"p40-checkpointing-and-unused", "p02-pad-id-minus-one", "p30-unequal-masks", "c5-integer-masks"}
ALL = sorted(path.parent.name for path in CASES.glob("*/expected.json"))
BAD = [case for case in ALL if case not in NOT_HERE and not expected_of(case)["clean"] and case != "p33-one-long-sample"]
CONTROLS = [case for case in ALL if case not in NOT_HERE and expected_of(case)["clean"]]
HELD_ANYWAY = {"p07-position-offset", "p08-labels-longer-than-decoder", "p18-ignore-index-one-hot"}
HELD_ANYWAY |= {"p22-missing-sigmoid", "p20-integer-targets", "p24-ctc-too-long", "p32-last-batch-of-one"}


needs_cases = pytest.mark.skipif(
    not CASES.is_dir(), reason="the public failure cases are a checkout of their own: TORCH_WATCHDOG_SHARED names the folder"
)


@needs_cases
def test_the_cases_are_where_they_should_be() -> None:
    assert len(BAD) >= 25
    assert len(CONTROLS) >= 12


@pytest.mark.parametrize("case", BAD)
def test_a_bad_batch_is_named_in_every_field(case: str) -> None:
    outcome = run_case(case)
    assert outcome.said == []
    assert outcome.violation is not None, outcome.how
    score = scored(case, outcome.violation)
    assert score.caught, score.wrong
    assert score.exact, score.wrong


@pytest.mark.parametrize("case", [case for case in BAD if case not in HELD_ANYWAY])
def test_what_has_been_learned_for_certain_is_held_at_hand_over_and_can_be_repaired(case: str) -> None:
    outcome = run_case(case)
    assert outcome.how == "held"
    assert outcome.repaired


@pytest.mark.parametrize("case", CONTROLS)
def test_a_legal_run_stays_silent(case: str) -> None:
    outcome = run_case(case)
    assert (outcome.violation, outcome.how, outcome.warnings, outcome.said) == (None, "ran", [], [])
    assert outcome.traced < outcome.batches


@needs_cases
def test_a_batch_far_larger_than_any_is_a_warning_that_names_the_long_sample() -> None:
    outcome = run_case("p33-one-long-sample")
    assert outcome.violation is None
    (warning,) = outcome.warnings
    assert scored("p33-one-long-sample", warning).exact
