"""Steps put together from blocks, and the strip that shows them in 80 columns."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_watchdog.report.steps import as_json, tracks
from torch_watchdog.report.text import folded, plain, render_timeline
from torch_watchdog_proto.messages import StepBlock

JOB = {"job": "train-1", "started": "2026-01-31T00:00:00Z", "ended": "2026-01-31T00:00:12Z", "exit_code": 65, "exit_reason": "stopped"}
INCIDENT: dict[str, Any] = {
    "severity": "critical",
    "kind": "batch.index_out_of_range",
    "time": "2026-01-31T00:00:05Z",
    "attempt": 0,
    "origin": {"rank": 1},
    "step": 5,
    "summary": "input_ids[2,7] is 70",
}


def block(rank: int, steps: range, *, attempt: int = 0, step_ms: int = 10, first_loss: float = 2.0, **columns: Any) -> StepBlock:
    count = len(steps)
    values: dict[str, Any] = {
        "micro_step": (0,) * count,
        "micro_of_step": tuple(steps),
        "micro_time_ns": tuple(step * 10**9 for step in steps),
        "loader_ns": (0,) * count,
        "loss": tuple(first_loss - 0.1 * step for step in steps),
        "loss_known": (True,) * count,
        "evaluation": (False,) * count,
        "step": tuple(steps),
        "step_time_ns": tuple(step * 10**9 for step in steps),
        "step_ns": (step_ms * 10**6,) * count,
        "vetoed": (False,) * count,
    }
    return StepBlock(rank=rank, attempt=attempt, pid=1, first_record=1, **(values | columns))


def rendered(blocks: list[StepBlock], incidents: tuple[dict[str, Any], ...] = ()) -> list[str]:
    return [plain(line) for line in render_timeline(JOB, tracks(blocks), incidents)]


def test_where_nobody_has_told_why_it_ended_no_reason_is_shown() -> None:
    lines = render_timeline({"job": "train-1", "exit_code": 65}, tracks([block(0, range(4))]), ())
    assert plain(lines[0]).startswith("job train-1, 1 rank") and plain(lines[1]) == "exit code 65"


def test_a_strip_shows_each_rank_its_losses_and_its_step_time() -> None:
    lines = rendered([block(0, range(6)), block(1, range(6), vetoed=(False,) * 5 + (True,))], (INCIDENT,))
    assert lines[:2] == ["job train-1, 2 ranks, 6 steps, 12 s", "exit code 65 (stopped)"]
    assert lines[2] == "rank 0  |......              | 6 steps, loss 2 to 1.5, 10 ms"
    assert lines[3] == "rank 1  |.....X              | 6 steps, loss 2 to 1.5, 10 ms"
    assert lines[-2:] == ["X 00:00:05Z batch.index_out_of_range: rank 1, step 5", "    input_ids[2,7] is 70"]


@pytest.mark.parametrize(("good", "mark"), [(True, "+"), (False, "!")])
def test_a_checkpoint_that_somebody_asked_for_and_got_is_nothing_bad(good: bool, mark: str) -> None:
    action = {"checkpoint": {"path": "checkpoints/step-5", "committed": good, "finite": True}}
    order = INCIDENT | {"kind": "order.checkpoint", "severity": "info", "origin": {"rank": None}, "action": action}
    lines = rendered([block(0, range(6))], (order,))
    assert [line[0] for line in lines if "order.checkpoint" in line] == [mark]
    meaning = {"+": "+ asked for, and good", "!": "! finding"}[mark]
    assert [line for line in lines if meaning in line] == [f". trained  {meaning}"], lines


def test_a_step_that_no_float_holds_is_shown_too() -> None:
    assert rendered([block(0, range(6))], (INCIDENT | {"step": 2**70 + 1},))[2].startswith("rank 0  |")


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({}, "loading 20%, forward 30%, backward and waiting 25%, update 15%, the loop itself 10%"),
        ({"update_ns": ()}, "loading 20%, forward 30%, backward, waiting and update 40%, the loop itself 10%"),
        ({"gpu": "GPU-1"}, "loading 20%, forward 30%, backward, waiting, update and the loop itself 50%"),
    ],
    ids=["on a CPU", "of an older version", "on a GPU"],
)
def test_where_the_time_of_the_steps_went_is_said_as_far_as_it_is_known(columns: dict[str, Any], told: str) -> None:
    """Of a GPU the loop's own marks say when work was queued, not when it was done."""
    times = {"loader_ns": 2, "forward_ns": 3, "backward_ns": 4, "update_ns": 1.5}
    known = {name: (int(ms * 10**6),) * 8 for name, ms in times.items()}
    assert f"time: {told}" in rendered([block(0, range(8), **(known | columns))])


def test_an_update_that_was_skipped_is_marked() -> None:
    assert "|..v..." in rendered([block(0, range(6), vetoed=tuple(step == 2 for step in range(6)))])[2]


def test_a_step_that_took_twice_the_median_is_marked_slow() -> None:
    times = tuple(50_000_000 if step == 3 else 10_000_000 for step in range(6))
    assert "|...~.." in rendered([block(0, range(6), step_ns=times)])[2]


def test_a_rank_that_stopped_early_shows_nothing_where_the_others_went_on() -> None:
    assert "|..... " in rendered([block(0, range(9)), block(1, range(5))])[3]


def test_the_faulty_step_is_shown_though_it_never_ended() -> None:
    assert "|.....X " in rendered([block(0, range(5)), block(1, range(5))], (INCIDENT,))[3]


def test_two_attempts_of_one_rank_are_two_strips() -> None:
    lines = rendered([block(0, range(4)), block(0, range(2), attempt=1)])
    assert "rank 0.1 is rank 0 in attempt 1 of the launcher, whose first is 0" in lines
    assert lines[2].startswith("rank 0.0 |....") and lines[3].startswith("rank 0.1 |..  ")


def test_the_loss_of_a_step_is_the_mean_of_its_batches_and_evaluation_is_left_out() -> None:
    columns: dict[str, Any] = {
        "micro_of_step": (0, 0, 0),
        "micro_step": (0, 1, 2),
        "micro_time_ns": (1, 2, 3),
        "loader_ns": (0, 0, 0),
        "loss": (1.0, 3.0, 50.0),
        "loss_known": (True, True, True),
        "evaluation": (False, False, True),
    }
    (track,) = tracks([block(0, range(1), **columns)])
    assert track.loss == {0: 2.0} and track.evaluated == {0}


def test_a_block_that_comes_twice_changes_nothing() -> None:
    once, twice = tracks([block(0, range(5))]), tracks([block(0, range(5)), block(0, range(5))])
    assert as_json(once[0]) == as_json(twice[0])


def test_a_block_whose_columns_are_not_of_one_length_does_not_cost_the_rest() -> None:
    (track,) = tracks([block(0, range(5), step_time_ns=(1, 2, 3), loss=(1.0,))])
    assert track.steps == [0, 1, 2] and track.loss == {0: 1.0}


def test_a_job_without_a_step_says_so() -> None:
    assert rendered([])[2] == "no rank has reported a step"


def test_a_loss_that_is_no_number_stays_valid_json() -> None:
    (track,) = tracks([block(0, range(2), first_loss=math.nan)])
    assert json.loads(json.dumps(as_json(track), allow_nan=False))["loss"] == ["nan", "nan"]


@given(st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 10**6), st.integers(1, 300)), min_size=1, max_size=6), st.integers(0, 10**6))
def test_no_strip_is_wider_than_80_columns(ranks: list[tuple[int, int, int]], step: int) -> None:
    blocks = [block(rank, range(first, first + count), first_loss=-1234.5678) for rank, first, count in ranks]
    lines = rendered(blocks, ({**INCIDENT, "step": step, "origin": {"rank": ranks[0][0]}},))
    assert max(map(len, lines[2 : 2 + len({rank for rank, *_ in ranks})])) <= 80


def test_a_long_sentence_is_folded_between_words_below_its_own_label() -> None:
    text = "  why    The table has 512 rows and this batch needs 734: tokens were added to the tokenizer and not to the model."
    lines = [" " * indent + text[begin:end] for indent, begin, end in folded(text, 40)]
    assert max(map(len, lines)) <= 40 and " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert lines[0].startswith("  why    The") and all(line.startswith(" " * 9) for line in lines[1:])


def test_a_line_to_type_is_one_piece_and_a_word_without_end_too() -> None:
    for text in ("  resume watchdog --resume runs/train-1/checkpoints/step-4 torchrun train.py", "x" * 100, ""):
        assert folded(text, 40) == [(0, 0, len(text))]


def test_the_loss_of_a_step_that_never_ended_is_none_of_the_ranks_unless_it_is_no_number() -> None:
    def last(loss: float, **columns: Any) -> float:
        begun = block(0, range(2, 3), first_loss=loss, step=(), step_time_ns=(), step_ns=(), vetoed=())
        (track,) = tracks([block(0, range(2), **columns), begun])
        return list(track.loss.values())[-1]

    assert last(7.0) == 1.9
    assert math.isnan(last(math.nan))
    nothing = {"step": (), "step_time_ns": (), "step_ns": (), "vetoed": ()}
    assert last(7.0, **nothing) == 6.8
