"""A launch that goes on from a checkpoint counts its steps from 0: every view tells the updates too, and two launches are laid beside each other by them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from histories import INCIDENT, RECORD, history

from torch_watchdog.launch.record import resumed_from
from torch_watchdog.phrases import steps_told, who
from torch_watchdog.report.compare import comparison
from torch_watchdog.report.evidence import Evidence
from torch_watchdog.report.history import JobHistory
from torch_watchdog.report.markdown import markdown_report
from torch_watchdog.report.page import report_page, timeline_page
from torch_watchdog.report.perfetto import thinning, trace_events, trace_metadata
from torch_watchdog.report.steps import as_json
from torch_watchdog.report.story import story
from torch_watchdog.report.text import plain, render_comparison, render_timeline


def launch(num_steps: int, *, began: int, vetoed: int | None = None, first_loss: float = 2.0, **more: Any) -> JobHistory:
    """Its losses fall by 0.1 a step, its checkpoint held `began` updates, and one step may make none."""
    left_out = [step == vetoed for step in range(num_steps)]
    updates = tuple(began + step + 1 - sum(left_out[: step + 1]) for step in range(num_steps))
    return history(num_steps, updates_applied=updates, vetoed=tuple(left_out), first_loss=first_loss, **more)


STOPPED = launch(6, began=0, vetoed=5)
RESUMED = launch(4, began=5, first_loss=1.5, incidents=())
WHOLE = launch(9, began=0, incidents=())


def test_steps_are_told_with_their_updates() -> None:
    assert steps_told(24, began=0, updates=23) == "24 steps (23 updates)"
    assert steps_told(36, began=23, updates=59) == "36 steps (updates 24 to 59)"
    assert steps_told(1, began=23, updates=23) == "1 step (no update after the 23 that it began with)"
    assert steps_told(6, began=None, updates=None) == "6 steps"


def test_the_resumed_half_is_compared_with_the_same_steps_of_the_whole() -> None:
    found = comparison(WHOLE, RESUMED)
    assert found["loss"]["aligned_by"] == "updates" and found["loss"]["spans"] == [[0, 8], [5, 8]]
    assert (found["loss"]["common_steps"], found["loss"]["first_difference_at_step"]) == (4, None)
    lines = [plain(line) for line in render_comparison(found)]
    assert lines[-2:] == [
        "compared by updates before the step: train-1 0 to 8 and train-1 5 to 8",
        "the losses are the same in all 4 common steps",
    ]


def test_a_job_and_the_one_that_goes_on_from_it_have_no_step_in_common() -> None:
    found = comparison(STOPPED, RESUMED)
    assert found["loss"]["spans"] == [[0, 4], [5, 8]] and found["loss"]["common_steps"] == 0
    assert plain(render_comparison(found)[-1]) == "they have no step in common: train-1 goes on where train-1 ended"


def test_jobs_that_did_not_record_updates_are_compared_by_step_and_that_is_said() -> None:
    found = comparison(history(), RESUMED)
    assert found["loss"]["aligned_by"] == "step" and found["loss"]["spans"] == [[0, 5], [0, 3]]
    assert plain(render_comparison(found)[-2]).startswith("compared by step: ")


def test_the_timeline_of_a_resumed_launch_has_an_axis_of_updates() -> None:
    lines = [plain(line) for line in render_timeline(RECORD, RESUMED.tracks, ())]
    assert lines[0].startswith("job train-1, 4 ranks, 4 steps (updates 6 to 9), ")
    assert [line.split()[:3] for line in lines if line.startswith(("step", "updates"))] == [["step", "0", "3"], ["updates", "5", "8"]]
    whole = [plain(line) for line in render_timeline(RECORD, WHOLE.tracks, ())]
    assert "9 steps (9 updates)" in whole[0] and not any(line.startswith("updates") for line in whole)


def test_an_incident_tells_the_updates_before_its_step_where_they_are_another_number() -> None:
    found = INCIDENT | {"step": 2, "batch": None}
    assert who(found | {"framework_step": 7}) == "rank 1, step 2 (after 7 updates)"
    assert who(found | {"framework_step": None}) == who(found) == "rank 1, step 2"
    again = found | {"attempt": 1}
    assert who(again | {"framework_step": 7}) == "rank 1, step 2 of attempt 1 (after 7 updates)"
    assert who(again | {"step": None}) == "rank 1, attempt 1"


def test_pages_markdown_json_and_traces_tell_the_same_updates() -> None:
    page, markdown = report_page(RESUMED, Evidence(), ()), markdown_report(RESUMED, Evidence(), ())
    assert "4 steps (updates 6 to 9)" in page and "4 steps (updates 6 to 9)" in markdown and "4 steps (updates 6 to 9)" in story(RESUMED)[0]
    for html in (page, timeline_page(RESUMED)):
        assert "after 5 updates" in html and "step 0, after 5 updates" in html
    assert "after 5 updates" not in timeline_page(WHOLE)
    assert as_json(RESUMED.tracks[0])["updates_before"] == [5, 6, 7, 8] and as_json(RESUMED.tracks[0])["began_at_update"] == 5
    kept = thinning(RESUMED)
    steps = [event["args"] for event in trace_events(RESUMED, kept) if event.get("cat") == "step"]
    assert {(step["step"], step["updates_before"]) for step in steps} == {(0, 5), (1, 6), (2, 7), (3, 8)}
    assert trace_metadata(RESUMED, kept)["steps"] == "4 steps (updates 6 to 9)"
    json.dumps(comparison(WHOLE, RESUMED), allow_nan=False)


def test_a_resumed_launch_is_linked_to_the_one_before() -> None:
    record = RECORD | {"resume": "/r/train-1/checkpoints/step-5"}
    assert "resumed from train-1 at step 5" in plain(render_timeline(record, RESUMED.tracks, ())[0])
    assert "resumed from train-1 at step 5" in story(replace(RESUMED, record=record))[0]
    assert "resumed" not in plain(render_timeline(RECORD, RESUMED.tracks, ())[0]) + story(RESUMED)[0]


@pytest.mark.parametrize(
    ("resume", "unused", "words"),
    [
        ("/r/demo/checkpoints/step-23", None, "demo at step 23"),
        ("/out/checkpoint-500", None, "/out/checkpoint-500"),  # a Trainer's
        ("/r/demo/checkpoints/step-23", "/r/demo/checkpoints/step-23", ""),  # no rank took it
        (None, None, ""),
    ],
)
def test_what_a_launch_resumed_is_named_by_its_job(resume: str | None, unused: str | None, words: str) -> None:
    assert resumed_from({"resume": resume, "end": {"unused_resume": unused}}) == words
