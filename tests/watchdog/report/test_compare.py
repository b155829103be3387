"""Two jobs side by side."""

from __future__ import annotations

from histories import block, history

from torch_watchdog.report.compare import comparison
from torch_watchdog.report.history import history_of
from torch_watchdog.report.text import plain, render_comparison, render_timeline
from torch_watchdog_proto.messages import NodeReport, StepTable


def test_the_step_from_which_losses_part_is_named() -> None:
    changed = tuple(2.0 - 0.1 * step + (0.5 if step >= 3 else 0) for step in range(6))
    found = comparison(history(), history(loss=changed))
    assert found["loss"]["first_difference_at_step"] == 3 and found["loss"]["common_steps"] == 6
    assert plain(render_comparison(found)[-1]) == "the losses part at step 3; at step 5 they are 1.5 and 2"


def test_a_step_in_which_a_rank_died_is_no_step_in_which_losses_part() -> None:
    whole, blocks = history(ranks=2), (block(0, 6, first_loss=2.0), block(1, 5, first_loss=2.0))
    died = history_of("j", {"job": "j"}, [("n", "s", NodeReport(seq=1, time_ns=1, steps=StepTable.of(blocks)))])
    alone = history_of(
        "j", {"job": "j"}, [("n", "s", NodeReport(seq=1, time_ns=1, steps=StepTable.of((block(0, 6), block(1, 6, first_loss=3.0)))))]
    )
    assert (comparison(alone, died)["loss"]["common_steps"], comparison(whole, died)["loss"]["common_steps"]) == (5, 5)
    assert comparison(whole, died)["loss"]["first_difference_at_step"] is None
    assert comparison(died, died)["figures"]["last loss"] == [1.6, 1.6]


def test_the_same_run_twice_has_no_difference() -> None:
    found = comparison(history(), history())
    assert all(one == two for one, two in found["figures"].values())
    assert plain(render_comparison(found)[-1]) == "the losses are the same in all 6 common steps"


def test_a_comparison_fits_into_80_columns() -> None:
    found = comparison(history(), history(0))
    found["jobs"] = ["a" * 100, "b" * 100]
    assert max(len(plain(line)) for line in render_comparison(found)) <= 80


def test_figures_tell_ranks_steps_times_and_memory() -> None:
    figures = comparison(history(), history(3, ranks=2))["figures"]
    assert (figures["ranks"], figures["steps"], figures["median step"]) == ([4, 2], [6, 3], [1.0, 1.0])
    assert figures["waiting for data"] == [0.1, 0.1] and figures["peak memory"] == [2**30, 2**30]


def test_an_attempt_that_the_launcher_started_again_has_no_exit_code_of_the_job() -> None:
    reports = [("n", "s", NodeReport(seq=1, time_ns=1, steps=StepTable.of((block(0, 3), block(0, 2, attempt=1)))))]
    job = history_of("j", {"job": "j", "exit_code": 0, "exit_reason": "finished"}, reports)
    first, second = (job.of_attempt(attempt) for attempt in (0, 1))
    assert plain(render_timeline(first.record, first.tracks, ())[1]) == "ended, and the launcher started attempt 1"
    assert plain(render_timeline(second.record, second.tracks, ())[1]) == "exit code 0 (finished)"
    assert comparison(first, second)["figures"]["exit code"] == [None, 0]
