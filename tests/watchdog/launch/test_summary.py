"""The last words of a launch: who, what, allowed range, what was saved, the line that resumes; never more than twelve lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_watchdog.launch.going_on import to_go_on
from torch_watchdog.launch.job_end import JobEnd, end_of
from torch_watchdog.launch.summary import goes_on_from, summarise
from torch_watchdog.phrases import allowed_range, as_typed, one_line, shortened, what_offends, who

END = JobEnd(
    job="train-1",
    run_dir="/home/a/watchdog_runs/train-1",
    here="/home/a",
    exit_code=65,
    stopped_by_us=True,
    ranks_reported=2,
    ranks_expected=2,
    steps=6,
    options=("--policy", "stop"),
    command=("torchrun", "--nproc-per-node", "2", "my train.py"),
)
INCIDENT: dict[str, Any] = {
    "id": "1",
    "kind": "batch.index_out_of_range",
    "severity": "critical",
    "time": "2026-01-31T23:59:59Z",
    "origin": {"rank": 1},
    "step": 5,
    "summary": "rank 1 fetched a batch whose input_ids[2,7] is 70",
    "cause": "the table has 64 rows",
    "fix": "resize the embedding",
    "batch": {"key": "input_ids", "element": [2, 7], "value": 70, "count": 1, "sample": {"dataset_index": 45, "position_in_batch": 2}},
    "bound": {"low": 0, "high": 63, "op": "embedding", "module": "transformer.wte", "source": "model.py:31"},
    "action": {
        "policy": "stop",
        "prevented": True,
        "exit_code": 65,
        "stopped_at_step": 5,
        "checkpoint": {"path": "/home/a/watchdog_runs/train-1/checkpoints/step-5", "updates_applied": 5, "committed": True, "finite": True},
    },
}


def test_the_line_that_resumes_works_from_another_folder_too() -> None:
    """The script and the options were typed in the launch's folder: whoever stands elsewhere goes there first."""
    away = replace(END, here="/home/b", folder="/home/a", quarantine="/home/a/watchdog_runs/train-1/quarantine.jsonl")
    lines = dict(line.strip().split(maxsplit=1) for line in summarise([INCIDENT], away)[1:])
    assert lines["resume"].startswith(
        "cd /home/a && watchdog --policy stop --quarantine watchdog_runs/train-1/quarantine.jsonl --resume watchdog_runs"
    )
    assert lines["saved"].startswith("/home/a/watchdog_runs/") and lines["more"] == "watchdog timeline /home/a/watchdog_runs/train-1"
    assert summarise([INCIDENT], replace(END, folder=END.here)) == summarise([INCIDENT], END)


def test_a_resumed_launch_tells_the_updates_that_it_went_on_with() -> None:
    end = replace(END, exit_code=0, stopped_by_us=False, steps=36, began_at_update=23, updates=59)
    assert summarise([], end) == ["job train-1: 2 ranks, 36 steps (updates 24 to 59), nothing found (exit code 0)"]


def test_floats_are_told_with_as_many_digits_as_anybody_reads() -> None:
    batch = {"key": "chance", "element": [1], "value": 1.0000001192092896}
    assert what_offends({"batch": batch, "bound": {"low": 0.0, "high": 0.30000001192092896}}) == "chance[1] = 1, allowed 0.0..0.3"
    assert what_offends({"batch": batch | {"value": 255.0}, "bound": None}) == "chance[1] = 255.0"


def test_a_stop_names_who_what_where_why_and_what_to_type_next() -> None:
    assert summarise([INCIDENT], END) == [
        "job train-1 stopped before the bad batch was used: batch.index_out_of_range (exit code 65)",
        "  who    rank 1, step 5, dataset sample 45, position 2 in the batch",
        "  what   input_ids[2,7] = 70, allowed 0..63",
        "  where  embedding in transformer.wte (model.py:31)",
        "  why    the table has 64 rows",
        "  fix    resize the embedding",
        "  saved  watchdog_runs/train-1/checkpoints/step-5 (5 updates, verified)",
        "  resume watchdog --policy stop --resume watchdog_runs/train-1/checkpoints/step-5 torchrun --nproc-per-node 2 'my train.py'",
        "  more   watchdog timeline watchdog_runs/train-1",
    ]


def test_a_batch_that_was_found_inside_its_step_has_failed_it() -> None:
    refused = INCIDENT | {"action": INCIDENT["action"] | {"stopped_at_step": None}}
    headline = "job train-1 failed on a bad batch; no update used it: batch.index_out_of_range (exit code 65)"
    assert summarise([refused], END)[0] == headline
    by_ranks = {"path": "/r/checkpoints/step-5", "updates_applied": 5, "committed": True, "finite": True, "format": "dcp"}
    assert summarise([refused], replace(END, sealed=by_ranks))[0] == headline
    nobody_wrote_it = refused | {"action": refused["action"] | {"checkpoint": None}}
    assert summarise([nobody_wrote_it], replace(END, sealed=by_ranks))[0].startswith("job train-1 stopped before the bad batch was used")


def in_form(form: str) -> list[str]:
    checkpoint = {**INCIDENT["action"]["checkpoint"], "format": form}
    return summarise([{**INCIDENT, "action": {**INCIDENT["action"], "checkpoint": checkpoint}}], END)


@pytest.mark.parametrize("form", ["dcp", "accelerate", "deepspeed", "transformers", "lightning"])
def test_the_line_to_type_is_enough_where_the_framework_is_told_by_it(form: str) -> None:
    lines = in_form(form)
    resume = "watchdog --policy stop --resume watchdog_runs/train-1/checkpoints/step-5 torchrun --nproc-per-node 2 'my train.py'"
    assert f"  resume {resume}" in lines
    assert not [line for line in lines if line.startswith("  call ")]


def test_what_the_script_must_call_to_load_its_own_form_stands_beside_what_is_typed() -> None:
    lines = in_form("callback")
    assert "  resume watchdog --policy stop torchrun --nproc-per-node 2 'my train.py'" in lines
    assert "  saved  watchdog_runs/train-1/checkpoints/step-5 (5 updates, as your on_checkpoint function wrote it)" in lines
    (line,) = [line for line in lines if line.startswith("  call ")]
    assert 'then restore(model=None, loader=..., path="watchdog_runs/train-1/checkpoints/step-5"), in the script' in line
    assert len(lines) <= 10


def test_a_run_without_findings_ends_with_one_line() -> None:
    end = replace(END, exit_code=0, stopped_by_us=False)
    assert summarise([], end) == ["job train-1: 2 ranks, 6 steps, nothing found (exit code 0)"]


def test_where_no_rank_reported_that_is_said_and_nothing_else_is_claimed() -> None:
    lines = summarise([], replace(END, exit_code=0, stopped_by_us=False, ranks_reported=0))
    assert lines[0].startswith("job train-1: 0 of 2 ranks reported, so nothing was watched")
    assert "nothing found" not in " ".join(lines)


def test_a_launch_that_is_ended_from_outside_before_its_ranks_report_is_told_as_that() -> None:
    (line,) = summarise([], replace(END, exit_code=143, stopped_by_us=False, ranks_reported=0, signalled="SIGTERM"))
    assert line == "job train-1: SIGTERM ended it before any rank had begun to train (exit code 143)"


def test_the_first_critical_incident_is_told_and_the_others_are_counted() -> None:
    earlier_warning = INCIDENT | {"severity": "warning", "kind": "loss.spike", "time": "2026-01-31T00:00:00Z"}
    later = INCIDENT | {"kind": "rank.died", "time": "2026-02-01T00:00:00Z"}
    lines = summarise([later, earlier_warning, INCIDENT], END)
    assert "batch.index_out_of_range" in lines[0]
    assert lines[-1] == "  more   watchdog timeline watchdog_runs/train-1; 2 incidents more: watchdog incidents watchdog_runs/train-1"


@pytest.mark.parametrize(
    ("steps", "told"), [((5, 5), "went on without the bad batch: "), ((5, 6, 9), "went on without the bad batches of 3 steps, first: ")]
)
def test_the_steps_that_were_left_out_are_counted(steps: tuple[int, ...], told: str) -> None:
    action = INCIDENT["action"] | {"policy": "skip", "prevented": True, "exit_code": None, "checkpoint": None}
    found = [INCIDENT | {"step": step, "time": f"2026-01-31T00:00:0{step}Z", "action": action} for step in steps]
    end = replace(END, exit_code=0, stopped_by_us=False)
    assert summarise(found, end)[0] == f"job train-1 {told}batch.index_out_of_range (exit code 0)"
    assert f"step {steps[0]}" in summarise(found, end)[1]


def test_what_failed_on_another_rank_beside_a_bad_batch_has_a_line_of_its_own() -> None:
    other = of_attempt(0, "rank.exception") | {"origin": {"rank": 0}, "summary": "rank 0, in step 5: ValueError: a mistake"}
    lines = summarise([INCIDENT | {"attempt": 0}, other], END)
    assert [line for line in lines if line.startswith("  also")] == ["  also   rank 0, step 5: ValueError: a mistake"]
    assert not any(line.startswith("  also") for line in summarise([INCIDENT | {"attempt": 0}, other | {"attempt": 1}], END))


def test_a_checkpoint_that_is_not_committed_is_never_offered_for_resuming() -> None:
    action = INCIDENT["action"] | {"checkpoint": {"path": "x/step-5", "updates_applied": 5, "committed": False}}
    lines = summarise([INCIDENT | {"action": action}], END)
    assert any("do not use it" in line for line in lines)
    assert not any(line.startswith("  resume") for line in lines)


@pytest.mark.parametrize(
    ("path", "typed"),
    [("/home/a/runs/j", "runs/j"), ("/home/a/j", "./j"), ("/elsewhere/j", "/elsewhere/j"), ("", ""), ("runs/j", "runs/j")],
)
def test_a_path_is_shown_as_a_person_would_type_it(path: str, typed: str) -> None:
    assert as_typed(path, "/home/a") == typed


def test_who_stands_at_the_root_is_shown_whole_paths() -> None:
    """`home/a/runs` would be right there, and looks like a lost slash."""
    assert as_typed("/home/a/runs", "/") == "/home/a/runs"


def test_a_stop_without_a_checkpoint_says_so() -> None:
    lines = summarise([INCIDENT | {"action": {"policy": "stop", "prevented": True, "checkpoint": None}}], END)
    assert "  saved  no checkpoint was written" in lines


@pytest.mark.parametrize(
    ("policy", "exit_code", "words"),
    [("skip", 0, "went on without the bad batch"), ("observe", 1, "observed, nothing was changed"), ("none", 1, "failed")],
)
def test_the_headline_says_what_was_done(policy: str, exit_code: int, words: str) -> None:
    incident = INCIDENT | {"action": {"policy": policy, "prevented": policy == "skip"}}
    assert words in summarise([incident], replace(END, stopped_by_us=False, exit_code=exit_code))[0]


@pytest.mark.parametrize(
    ("policy", "exit_code", "words"),
    [
        ("none", 0, "ended with a warning: batch.shape"), ("none", 1, "failed, after a warning: batch.shape"),
        ("observe", 0, "observed, nothing was changed: batch.shape, a warning"),
    ],
)  # fmt: skip
def test_the_headline_of_a_warning_calls_it_one(policy: str, exit_code: int, words: str) -> None:
    incident = INCIDENT | {"kind": "batch.shape", "severity": "warning", "action": {"policy": policy}}
    headline = summarise([incident], replace(END, exit_code=exit_code, stopped_by_us=False))[0]
    assert headline == f"job {END.job} {words} (exit code {exit_code})"


@pytest.mark.parametrize(("code", "words"), [(0, "came to its own end before it could be stopped"), (1, "failed")])
def test_a_training_that_diverged_in_its_last_steps_was_not_stopped_and_its_code_is_its_own(code: int, words: str) -> None:
    action = {"policy": "stop", "prevented": False, "exit_code": None, "checkpoint": None}
    nan = INCIDENT | {"kind": "loss.not_finite", "batch": None, "action": action}
    (head, *_) = summarise([nan], replace(END, stopped_by_us=False, exit_code=code))
    assert head == f"job train-1 {words}: loss.not_finite (exit code {code})"


def test_a_stop_that_somebody_asked_for_names_no_culprit_and_no_fix() -> None:
    order = {
        "kind": "order.stop",
        "severity": "info",
        "summary": "a clean stop: maintenance",
        "cause": "maintenance",
        "fix": "nothing is wrong",
    }
    assert summarise([order | {"action": INCIDENT["action"]}], replace(END, exit_code=0))[:3] == [
        "job train-1 stopped on request (exit code 0)",
        "  what   a clean stop: maintenance",
        "  saved  watchdog_runs/train-1/checkpoints/step-5 (5 updates, verified)",
    ]


def test_a_stop_that_somebody_asked_for_and_that_has_saved_nothing_says_so_first() -> None:
    summary = "a clean stop: maintenance; no checkpoint: rank 0: the disk is full"
    order = {"kind": "order.stop", "severity": "info", "summary": summary, "cause": "maintenance", "fix": "nothing is wrong"}
    action = INCIDENT["action"] | {"checkpoint": None, "exit_code": 1}
    assert summarise([order | {"action": action}], replace(END, exit_code=1))[:3] == [
        "job train-1 stopped on request, and saved nothing (exit code 1)",
        f"  what   {summary}",
        "  saved  no checkpoint was written",
    ]


@pytest.mark.parametrize(
    ("finite", "head", "state"),
    [
        (
            False,
            ", and what was saved holds NaN, infinity or a part of a step",
            "52 updates, holds NaN, infinity or a part of a step: do not use it",
        ),
        (True, ", and saved nothing that is complete", "52 updates, not complete: do not use it"),
    ],
)
def test_a_stop_that_somebody_asked_for_says_what_is_wrong_with_what_it_saved(finite: bool, head: str, state: str) -> None:
    order = {"kind": "order.stop", "severity": "info", "summary": "a clean stop", "cause": "maintenance", "fix": "nothing is wrong"}
    made = {"path": "/home/a/r/step-52", "updates_applied": 52, "committed": False, "finite": finite}
    lines = summarise([order | {"action": INCIDENT["action"] | {"checkpoint": made, "exit_code": 1}}], replace(END, exit_code=1))
    assert lines[0] == f"job train-1 stopped on request{head} (exit code 1)"
    assert f"  saved  r/step-52 ({state})" in lines and not any(line.startswith("  resume") for line in lines)


def test_after_a_checkpoint_on_request_a_stop_on_request_tells_the_newer_checkpoint() -> None:
    def order(kind: str, step: int, exit_code: int | None) -> dict[str, Any]:
        checkpoint = INCIDENT["action"]["checkpoint"] | {"path": f"/home/a/r/checkpoints/step-{step}", "updates_applied": step}
        action = {"policy": "stop", "prevented": False, "exit_code": exit_code, "checkpoint": checkpoint}
        return {"kind": kind, "severity": "info", "time": f"2026-01-31T00:00:0{step}Z", "summary": kind, "action": action}

    lines = summarise([order("order.checkpoint", 3, None), order("order.stop", 7, 0)], replace(END, exit_code=0))
    assert lines[0] == "job train-1 stopped on request (exit code 0)"
    assert "  saved  r/checkpoints/step-7 (7 updates, verified)" in lines
    assert any(line.startswith("  resume") and "step-7" in line for line in lines)


def test_the_incident_that_ended_the_job_is_told_before_a_graver_one_that_did_not() -> None:
    skipped = INCIDENT | {"time": "2026-01-31T00:00:00Z", "action": INCIDENT["action"] | {"policy": "skip", "exit_code": None}}
    stop = {
        "kind": "order.stop",
        "severity": "info",
        "time": "2026-02-01T00:00:00Z",
        "summary": "a clean stop",
        "action": INCIDENT["action"] | {"exit_code": 0},
    }
    assert summarise([skipped, stop], replace(END, exit_code=0))[0] == "job train-1 stopped on request (exit code 0)"


def test_a_severity_of_another_version_is_taken_for_the_gravest() -> None:
    lines = summarise([INCIDENT | {"severity": "warning"}, INCIDENT | {"severity": "fatal", "kind": "rank.died"}], END)
    assert "rank.died" in lines[0]


def test_the_death_that_ended_the_job_is_told_before_a_skip_that_it_had_gone_on_after() -> None:
    """And with it what was saved, and how to go on from there."""
    skipped = INCIDENT | {
        "time": "2026-01-31T00:00:00Z",
        "action": INCIDENT["action"] | {"policy": "skip", "checkpoint": None, "exit_code": None},
    }
    died = INCIDENT | {
        "kind": "rank.died",
        "time": "2026-02-01T00:00:00Z",
        "summary": "rank 0, in step 8: killed by SIGKILL",
        "action": INCIDENT["action"] | {"policy": "rescue", "prevented": False, "exit_code": None},
    }
    lines = summarise([skipped, died], replace(END, exit_code=1, stopped_by_us=False))
    assert "rank.died" in lines[0] and any(line.startswith("  resume") for line in lines)
    assert "went on without the bad batch" in summarise([skipped, died], replace(END, exit_code=0, stopped_by_us=False))[0]


def test_who_was_late_when_a_job_was_ended_is_told_unless_it_is_what_was_found() -> None:
    end = replace(
        END,
        exit_code=143,
        stopped_by_us=False,
        signalled="SIGTERM",
        standstill="rank 0 waits for rank 1: it is in train.py:40; no step for 113 s",
    )
    note = f"  note   it stood still by then: {end.standstill}"
    assert summarise([], end)[1:] == [note]
    interrupted = "job train-1 was interrupted (SIGINT, as by Ctrl-C): 2 ranks, 6 steps, at a standstill (exit code 1)"
    assert summarise([], replace(end, signalled="SIGINT", exit_code=1)) == [interrupted, note]
    asked_to_end = {"kind": "rank.died", "severity": "warning", "summary": "rank 1: ended by SIGTERM from outside"}
    assert note in summarise([asked_to_end], end)
    assert note not in summarise([{**asked_to_end, "kind": "rank.hang"}], end)
    assert note not in summarise([], replace(end, exit_code=0))


def test_ranks_that_a_killed_launcher_left_behind_are_told_with_their_pids_whatever_was_found() -> None:
    end = replace(END, exit_code=137, stopped_by_us=False, left_behind=tuple(range(11, 20)))
    note = "  note   9 ranks left behind, unwatched: pids 11, 12, 13, 14, 15, 16, 17, 18, ..."
    assert summarise([], end) == ["job train-1, its command killed: 2 ranks, 6 steps, nothing found (exit code 137)", note]
    assert summarise([INCIDENT], replace(end, unused_resume="/home/a/x"))[-2] == note
    record = {"exit_code": 137, "ranks_reported": 2, "end": {"steps": 6, "left_behind": list(end.left_behind)}}
    again = end_of(record, PurePath(END.run_dir), here=END.here, quarantine=None)
    assert again is not None and summarise([], again) == summarise([], end)


def test_a_replay_tells_whose_batch_it_was_for_its_own_rank_and_step_are_always_0() -> None:
    found = INCIDENT | {"origin": {"rank": 0}, "step": 0, "batch": INCIDENT["batch"] | {"sample": None}}
    lines = summarise([found], replace(END, replays="rank 1, step 5, dataset sample 45"))
    assert lines[1] == "  who    rank 0, step 0 of the replay; the batch is of rank 1, step 5, dataset sample 45"


def test_a_replay_that_raises_nothing_says_that_of_its_batch() -> None:
    end = replace(END, replays="rank 1, step 5, dataset sample 45", exit_code=0, stopped_by_us=False, steps=0)
    headline, why = summarise([], end)
    assert headline == "job train-1: the batch of rank 1, step 5, dataset sample 45 raised nothing here (exit code 0)"
    assert why.startswith("  why    it is not the batch alone: ") and "with the weights that the script begins with" in why
    assert "nothing found (exit code 1)" in summarise([], replace(end, exit_code=1))[0]


@pytest.mark.parametrize("more", [{}, {"kind": "rank.exception", "batch": None}, {"kind": "loss.not_finite", "batch": None}])
def test_a_batch_that_was_kept_is_told_with_the_line_that_runs_it_again(more: dict[str, Any]) -> None:
    found = INCIDENT | more | {"evidence": {"bundle": "bundles/0-1.safetensors"}}
    end = replace(END, exit_code=1, stopped_by_us=False)
    once_more = "; its batch once more: watchdog replay watchdog_runs/train-1/bundles/0-1.safetensors"
    assert summarise([found], end)[-1] == f"  more   watchdog timeline watchdog_runs/train-1{once_more}"
    assert "replay" not in summarise([found | {"evidence": None}], end)[-1]
    assert "watchdog replay" not in summarise([found], replace(end, replays="rank 1"))[-1]


def test_a_stop_that_was_taken_back_is_no_finding_of_a_job_that_went_on() -> None:
    taken_back = {
        "kind": "order.stop",
        "severity": "info",
        "summary": "a clean stop; given up: taken back by ann",
        "action": {"exit_code": None},
    }
    end = replace(END, exit_code=0, stopped_by_us=False)
    assert summarise([taken_back], end) == ["job train-1: 2 ranks, 6 steps, nothing found (exit code 0)"]
    assert "order.stop" in summarise([taken_back], replace(end, exit_code=1))[0]


def test_what_the_ranks_have_sealed_while_the_daemon_was_gone_is_there_to_go_on_from() -> None:
    nothing = INCIDENT | {"action": INCIDENT["action"] | {"checkpoint": None}}
    sealed = {"path": "/r/checkpoints/step-4", "updates_applied": 4, "committed": True, "finite": True, "format": "dcp"}
    lines = summarise([nothing], replace(END, sealed=sealed))
    assert any(line.startswith("  saved") and "step-4 (4 updates, verified)" in line for line in lines)
    assert any(line.startswith("  resume") and "step-4" in line for line in lines) and not any("  again" in line for line in lines)
    unknown = summarise([], replace(END, sealed=sealed, told=False))
    assert "what was found is not known" in unknown[0] and [line.split()[0] for line in unknown[1:]] == ["saved", "resume"]


def test_where_nothing_was_saved_the_next_run_leaves_the_sample_out() -> None:
    unsaved = INCIDENT | {"action": INCIDENT["action"] | {"checkpoint": None}}
    lines = summarise([unsaved], replace(END, quarantine="/home/a/watchdog_runs/train-1/quarantine.jsonl"))
    again = "watchdog --policy stop --quarantine watchdog_runs/train-1/quarantine.jsonl torchrun --nproc-per-node 2 'my train.py'"
    assert lines[-3:] == ["  saved  no checkpoint was written", f"  again  {again}", "  more   watchdog timeline watchdog_runs/train-1"]


KILLED = INCIDENT | {
    "kind": "rank.died",
    "summary": "rank 1, in step 5: killed by SIGKILL",
    "batch": None,
    "action": {"policy": "rescue", "prevented": False, "exit_code": None, "checkpoint": None},
}


def test_a_failure_after_which_no_checkpoint_is_there_says_so_and_how_to_begin_again() -> None:
    end = replace(END, exit_code=1, stopped_by_us=False)
    again = "  again  watchdog --policy stop torchrun --nproc-per-node 2 'my train.py'"
    assert summarise([KILLED], end)[-3:-1] == ["  saved  no checkpoint was written", again]
    without = summarise([KILLED], replace(end, unused_resume="/home/a/x"))
    assert "  saved  no checkpoint was written" in without and again not in without
    went_on = summarise([KILLED | {"attempt": 0}], replace(end, exit_code=0, attempt=1))
    assert not any(line.startswith(("  saved", "  again")) for line in went_on)


def test_a_failure_that_saved_nothing_names_the_checkpoint_of_an_earlier_attempt() -> None:
    first, second = INCIDENT | {"kind": "rank.died", "attempt": 0}, KILLED | {"attempt": 1}
    lines = summarise([first, second], replace(END, exit_code=1, stopped_by_us=False, attempt=1))
    assert lines[-3] == "  saved  watchdog_runs/train-1/checkpoints/step-5 (5 updates, verified), in attempt 0"
    assert lines[-2].startswith("  resume watchdog --policy stop --resume watchdog_runs/train-1/checkpoints/step-5 ")


def test_an_attempt_that_failed_before_its_ranks_were_heard_of_is_not_told_by_an_earlier_ones_failure() -> None:
    first = INCIDENT | {"kind": "rank.died", "attempt": 0, "batch": None, "summary": "rank 1, in step 5: killed by SIGKILL"}
    end = replace(END, exit_code=1, stopped_by_us=False, attempt=1)
    lines = summarise([first], end)
    assert lines == [
        "job train-1 failed in attempt 1, of which no rank's failure is known (exit code 1)",
        "  why    read the end of watchdog_runs/train-1/logs/rank-*.log: it is what that attempt has printed",
        "  before attempt 0 had failed: rank.died, rank 1, step 5: killed by SIGKILL",
        "  saved  watchdog_runs/train-1/checkpoints/step-5 (5 updates, verified), in attempt 0",
        "  resume watchdog --policy stop --resume watchdog_runs/train-1/checkpoints/step-5 torchrun --nproc-per-node 2 'my train.py'",
        "  more   watchdog timeline watchdog_runs/train-1; watchdog incidents watchdog_runs/train-1",
    ]
    interrupted = summarise([first], replace(end, signalled="SIGINT", exit_code=130))
    assert (
        interrupted[0] == "job train-1 was interrupted (SIGINT, as by Ctrl-C) in attempt 1 (exit code 130)" and "why" not in interrupted[1]
    )
    assert summarise([first], replace(end, attempt=0))[0] == "job train-1 failed: rank.died (exit code 1)"


@pytest.mark.parametrize("kind", ["batch.index_out_of_range", "rank.exception"])
def test_where_a_resumed_run_saved_nothing_the_next_one_goes_on_from_the_same_checkpoint(kind: str) -> None:
    unsaved = INCIDENT | {"kind": kind, "action": INCIDENT["action"] | {"checkpoint": None}}
    end = replace(
        END,
        resumed="/home/a/watchdog_runs/first/checkpoints/step-11",
        quarantine="/home/a/watchdog_runs/train-1/quarantine.jsonl",
        stopped_by_us=kind.startswith("batch."),
    )
    lines = summarise([unsaved], end)
    assert lines[-2] == (
        "  resume watchdog --policy stop --quarantine watchdog_runs/train-1/quarantine.jsonl --resume watchdog_runs/first/checkpoints/step-11 "
        "torchrun --nproc-per-node 2 'my train.py'"
    )
    assert not any("again" in line for line in lines)


def test_a_fault_without_a_batch_is_told_by_its_summary() -> None:
    incident = INCIDENT | {"batch": None, "bound": None, "kind": "rank.died", "summary": "rank 1 was killed by signal 9"}
    assert "  what   rank 1 was killed by signal 9" in summarise([incident], END)


def test_an_incident_is_gone_on_from_its_own_checkpoint_else_once_the_job_has_ended_from_the_newest() -> None:
    def made(step: int, **more: Any) -> dict[str, Any]:
        checkpoint = {"path": f"/r/step-{step}", "updates_applied": step, "committed": True, "finite": True} | more
        return INCIDENT | {"kind": "order.checkpoint", "action": {"checkpoint": checkpoint}}

    asked, bad = [made(3), made(9), made(11, finite=False), made(12)], KILLED | {"attempt": 1}
    assert goes_on_from(made(5), asked, ended=True)["path"] == "/r/step-5"
    assert goes_on_from(bad, asked, ended=False) == {} and goes_on_from(bad, [], ended=True) == {}
    assert goes_on_from(bad, asked, ended=True)["path"] == "/r/step-12"
    diverged = KILLED | {"kind": "loss.not_finite", "step": 10}
    assert goes_on_from(diverged, asked, ended=False)["path"] == "/r/step-9"


def test_what_had_ended_before_a_signal_came_is_not_advised_to_be_launched_again() -> None:
    died = INCIDENT | {
        "batch": None,
        "bound": None,
        "kind": "rank.died",
        "severity": "warning",
        "summary": "rank 1: ended by SIGTERM from outside",
    }
    died["action"] = INCIDENT["action"] | {"prevented": False, "policy": "rescue", "exit_code": None, "checkpoint": None}
    end = replace(END, exit_code=1, stopped_by_us=False)
    assert any(line.startswith("  again ") for line in summarise([died], end))
    over = died | {"summary": f"{died['summary']}, after its training was over"}
    for how in (end, replace(end, resumed="/home/a/watchdog_runs/first/checkpoints/step-11")):
        lines = summarise([over], how)
        assert not any(line.startswith(("  again ", "  resume ")) for line in lines)
        assert lines[0] == "job train-1 was ended from outside, after its training was over: rank.died (exit code 1)"


@pytest.mark.parametrize("severity", ["critical", "warning"])
def test_behind_a_training_that_was_over_no_older_checkpoint_is_advised(severity: str) -> None:
    died = KILLED | {"severity": severity, "summary": "rank 1: ended by SIGABRT on its way out, after its training was over"}
    checkpoint = {"path": "/home/a/watchdog_runs/train-1/checkpoints/step-25", "updates_applied": 25, "committed": True, "finite": True}
    asked = INCIDENT | {"kind": "order.checkpoint", "action": {"checkpoint": checkpoint}}
    end = replace(END, exit_code=1, stopped_by_us=False)
    lines = summarise([asked, died], end)
    assert any("step-25" in line and line.startswith("  saved ") for line in lines)
    assert not any(line.startswith(("  again ", "  resume ")) for line in lines)
    assert "after its training was over: rank.died" in lines[0]
    assert goes_on_from(died, [asked, died], ended=True) == {}
    under_way = died | {"summary": "rank 1: killed by SIGABRT"}
    assert any(line.startswith("  resume ") for line in summarise([asked, under_way], end))


def test_a_launch_that_somebody_interrupted_is_not_said_to_have_failed() -> None:
    incident = INCIDENT | {"batch": None, "bound": None, "kind": "rank.died", "severity": "warning", "summary": "rank 1: ended by SIGINT"}
    incident["action"] = INCIDENT["action"] | {"prevented": False, "policy": "none", "exit_code": None}
    assert (
        summarise([incident], replace(END, exit_code=130, stopped_by_us=False))[0]
        == "job train-1 was ended from outside: rank.died (exit code 130)"
    )


def test_a_daemon_that_did_not_answer_is_not_taken_for_a_run_without_findings() -> None:
    (line,) = summarise([], replace(END, exit_code=0, stopped_by_us=False, told=False))
    assert "nothing found" not in line and "not known" in line


def test_a_daemon_that_says_its_findings_and_shows_no_steps_is_believed() -> None:
    """As it is for a token that reports for all jobs and sees none."""
    (line,) = summarise([], replace(END, exit_code=0, stopped_by_us=False, steps=None))
    assert line == "job train-1: 2 ranks, nothing found (exit code 0)"


def test_a_derived_index_is_shown_with_its_arithmetic() -> None:
    batch = INCIDENT["batch"] | {"derived": {"expression": "cumsum(input_ids != 1) + 1", "value": 514}, "count": 3}
    assert what_offends(INCIDENT | {"batch": batch}) == (
        "input_ids[2,7] = 70, from which cumsum(input_ids != 1) + 1 = 514, allowed 0..63, and 2 elements more"
    )


def test_a_tensor_that_is_wrong_as_a_whole_is_told_with_what_is_wrong_with_it() -> None:
    summary = "rank 1, step 5: bbox has dtype float32; embedding needs int64 or int32"
    incident = INCIDENT | {"batch": {"key": "bbox"}, "bound": {"op": "embedding"}, "summary": summary}
    assert what_offends(incident) == "bbox has dtype float32; embedding needs int64 or int32"


def test_where_no_single_rank_is_at_fault_none_is_named() -> None:
    assert who({"origin": {"rank": None}, "step": 7}) == "no single rank, step 7"


@pytest.mark.parametrize(
    ("bound", "text"),
    [({"low": 0, "high": 9, "ignored": [-100]}, "0..9 or -100 (ignored)"), ({"low": 0, "high": None}, "0.."), ({}, "")],
)
def test_an_allowed_range_is_inclusive_and_lists_what_is_ignored(bound: dict[str, Any], text: str) -> None:
    assert allowed_range(bound) == text


def test_no_control_character_of_the_users_data_reaches_the_terminal() -> None:
    batch = INCIDENT["batch"] | {"key": "evil\x1b[2J\nkey"}
    lines = summarise([INCIDENT | {"batch": batch}], END)
    assert all(line.isprintable() for line in lines)
    assert one_line("a\tb\x07") == "a b "


_VALUES = st.none() | st.text(max_size=8)
_INCIDENTS = st.fixed_dictionaries(
    {},
    optional={
        "severity": st.sampled_from(["critical", "warning", "info"]),
        "summary": st.text(max_size=30),
        "cause": st.text(max_size=30),
        "fix": st.text(max_size=30),
        "batch": st.none() | st.fixed_dictionaries({"key": st.text(max_size=5)}),
        "bound": st.none() | st.fixed_dictionaries({}, optional={"low": st.integers(), "module": _VALUES, "source": _VALUES}),
        "action": st.none()
        | st.fixed_dictionaries({}, optional={"checkpoint": st.none() | st.fixed_dictionaries({"path": st.text(max_size=9)})}),
    },
)


@given(st.lists(_INCIDENTS, max_size=4), st.booleans())
def test_whatever_the_incidents_hold_twelve_lines_are_enough(incidents: list[dict[str, Any]], stopped: bool) -> None:
    lines = summarise(incidents, replace(END, stopped_by_us=stopped))
    assert 1 <= len(lines) <= 12


def of_attempt(attempt: int, kind: str) -> dict[str, Any]:
    action = INCIDENT["action"] | {"policy": "none", "prevented": False, "exit_code": None}
    more = {"attempt": attempt, "kind": kind, "batch": None, "bound": None, "action": action, "time": f"2026-01-31T00:00:0{attempt}Z"}
    return INCIDENT | more


def test_a_job_whose_later_attempt_came_to_its_end_finished_and_is_not_resumed() -> None:
    end = replace(END, exit_code=0, stopped_by_us=False, attempt=1)
    lines = summarise([of_attempt(0, "rank.exception")], end)
    assert lines[0] == "job train-1 finished in attempt 1 after rank.exception in attempt 0 (exit code 0)"
    assert any(line.startswith("  saved") for line in lines) and not any(line.startswith("  resume") for line in lines)


def test_a_job_whose_later_attempt_failed_too_tells_that_one() -> None:
    end = replace(END, exit_code=1, stopped_by_us=False, attempt=1)
    lines = summarise([of_attempt(0, "rank.died"), of_attempt(1, "rank.exception")], end)
    assert lines[0] == "job train-1 failed: rank.exception (exit code 1)"
    assert any(line.startswith("  resume") for line in lines)


@pytest.mark.parametrize(("form", "restores", "said"), [("dcp", False, True), ("dcp", True, False), ("transformers", False, False)])
def test_a_script_that_calls_no_restore_is_told_so_before_its_line_is_typed(form: str, restores: bool, said: bool) -> None:
    incident = INCIDENT | {"action": INCIDENT["action"] | {"checkpoint": INCIDENT["action"]["checkpoint"] | {"format": form}}}
    lines = summarise([incident], replace(END, restores=restores))
    (at,) = [place for place, line in enumerate(lines) if line.startswith("  resume ")]
    assert lines[at + 1].startswith("  call   torch_watchdog_agent.restore(") == said


@pytest.mark.parametrize("left_out", [None, "/home/a/watchdog_runs/train-1/quarantine.jsonl"])
def test_the_line_that_resumes_is_the_same_while_the_launch_still_runs(left_out: str | None) -> None:
    """As who asked for a checkpoint is told it."""
    record, checkpoint = {"options": list(END.options), "command": list(END.command)}, INCIDENT["action"]["checkpoint"]
    told = to_go_on(checkpoint, record, PurePath(END.run_dir), here=END.here, quarantine=left_out, restores=True)
    assert told == [line for line in summarise([INCIDENT], replace(END, quarantine=left_out)) if line.startswith("  resume ")] != []
    assert to_go_on(checkpoint, {}, PurePath(END.run_dir), here=END.here, quarantine=None, restores=True) == []  # a daemon's words only


def test_a_resume_that_no_rank_took_is_said() -> None:
    lines = summarise([], replace(END, exit_code=0, stopped_by_us=False, unused_resume="/home/a/runs/x/checkpoints/step-5"))
    assert "nothing found" in lines[0]
    assert lines[1].startswith("  note   --resume runs/x/checkpoints/step-5 was taken by nobody")


def test_a_checkpoint_on_request_is_no_finding_of_a_job_that_ended_well() -> None:
    asked = {**INCIDENT, "kind": "order.checkpoint", "severity": "info"}
    lines = summarise([asked], replace(END, exit_code=0, stopped_by_us=False))
    assert "nothing found" in lines[0]
    assert lines[1:] == ["  saved  watchdog_runs/train-1/checkpoints/step-5 (5 updates, verified), on request"]


@pytest.mark.parametrize(
    ("signalled", "words"), [("SIGINT", "was interrupted (SIGINT, as by Ctrl-C)"), ("SIGHUP", "was ended by SIGHUP from outside")]
)
def test_a_launch_that_its_user_ended_is_one_quiet_line_and_the_newest_checkpoint_that_was_asked_for(signalled: str, words: str) -> None:
    def asked(step: int, **more: Any) -> dict[str, Any]:
        made = INCIDENT["action"]["checkpoint"] | {"path": f"/home/a/r/checkpoints/step-{step}", "updates_applied": step} | more
        return INCIDENT | {
            "kind": "order.checkpoint",
            "severity": "info",
            "action": INCIDENT["action"] | {"checkpoint": made, "exit_code": None},
        }

    end = replace(END, exit_code=1, stopped_by_us=False, signalled=signalled)
    assert summarise([], end) == [f"job train-1 {words}: 2 ranks, 6 steps, nothing found (exit code 1)"]
    lines = summarise([asked(3), asked(5), asked(9, finite=False)], end)
    assert lines[:2] == [*summarise([], end), "  saved  r/checkpoints/step-5 (5 updates, verified), on request"]
    assert len(lines) == 3 and lines[2].startswith("  resume watchdog") and "r/checkpoints/step-5" in lines[2]


def test_a_training_that_ended_of_the_signal_before_it_could_be_stopped_cleanly_was_ended_and_has_not_failed() -> None:
    what = "a checkpoint and a stop before the machine is taken away: SIGTERM from outside; given up: the training ended before it could be"
    action = INCIDENT["action"] | {"checkpoint": None, "exit_code": None, "prevented": False}
    late = INCIDENT | {"kind": "order.preemption", "severity": "info", "summary": what, "batch": None, "action": action}
    lines = summarise([late], replace(END, exit_code=143, stopped_by_us=False, signalled="SIGTERM"))
    assert lines[0] == "job train-1 was ended by SIGTERM from outside: order.preemption (exit code 143)"
    assert lines[1:3] == [f"  what   {what}", "  saved  no checkpoint was written"]
    lines = summarise([asked_for(5), late], replace(END, exit_code=143, stopped_by_us=False, signalled="SIGTERM"))
    assert [line.partition("(")[0] for line in lines if line.startswith("  saved")] == ["  saved  r/checkpoints/step-5 "]


def test_a_training_that_was_over_when_the_signal_ended_it_is_not_advised_to_be_done_again() -> None:
    """Of a launch that had itself gone on from a checkpoint, too."""
    what = "a checkpoint and a stop before the machine is taken away: SIGTERM from outside; given up: the training ended before it could be carried out"
    action = INCIDENT["action"] | {"checkpoint": None, "exit_code": None, "prevented": False}
    late = INCIDENT | {"kind": "order.preemption", "severity": "info", "summary": what, "batch": None, "action": action}
    end = replace(END, exit_code=143, stopped_by_us=False, signalled="SIGTERM", resumed="/home/a/watchdog_runs/first/checkpoints/step-11")
    lines = summarise([late], end)
    assert lines[0] == "job train-1 was ended by SIGTERM from outside, after its training was over: order.preemption (exit code 143)"
    assert not any(line.startswith(("  again ", "  resume ")) for line in lines)
    unheard = summarise([late | {"summary": what.replace("the training ended", "rank 0 was gone")}], end)
    assert any(line.startswith("  resume ") for line in unheard)


def test_a_failure_of_which_nothing_was_saved_tells_what_somebody_had_asked_for_before() -> None:
    asked = INCIDENT | {"kind": "order.checkpoint", "severity": "info"}
    failed = INCIDENT | {"batch": None, "kind": "rank.exception", "action": INCIDENT["action"] | {"checkpoint": None, "exit_code": None}}
    lines = summarise([asked, failed], replace(END, exit_code=1, stopped_by_us=False))
    assert lines[0] == "job train-1 failed: rank.exception (exit code 1)"
    assert "  saved  watchdog_runs/train-1/checkpoints/step-5 (5 updates, verified), on request" in lines
    assert any(line.startswith("  resume") for line in lines)


@pytest.mark.parametrize(("policy", "exit_code", "stopped"), [("stop", 70, True), ("observe", 1, False), ("observe", 0, False)])
def test_a_job_whose_loss_became_nan_goes_on_from_what_somebody_had_asked_for_before_that(
    policy: str, exit_code: int, stopped: bool
) -> None:
    """As its fix says; not from one of later."""
    action = INCIDENT["action"] | {"policy": policy, "exit_code": exit_code if stopped else None, "checkpoint": None}
    nan = INCIDENT | {"kind": "loss.not_finite", "batch": None, "step": 7, "action": action}
    end = replace(END, exit_code=exit_code, stopped_by_us=stopped)
    lines = summarise([asked_for(5), asked_for(9), nan], end)
    assert [line for line in lines if line.startswith("  saved")] == ["  saved  r/checkpoints/step-5 (5 updates, verified), on request"]
    assert [line.split(" --")[2] for line in lines if line.startswith("  resume")] == ["resume r/checkpoints/step-5 torchrun"]
    none = summarise([asked_for(9), nan], end)
    assert [line for line in none if line.startswith(("  saved", "  resume"))] == ["  saved  no checkpoint was written"] * stopped


def test_a_stop_on_request_that_saved_nan_tells_the_good_checkpoint_of_before_too() -> None:
    made = {"path": "/home/a/r/not-good.step-52", "updates_applied": 52, "committed": False, "finite": False}
    stop = {"kind": "order.stop", "severity": "info", "summary": "a clean stop", "action": INCIDENT["action"] | {"checkpoint": made}}
    lines = summarise([asked_for(5), stop], replace(END, exit_code=1))
    assert [line for line in lines if line.startswith("  saved")] == [
        "  saved  r/not-good.step-52 (52 updates, holds NaN, infinity or a part of a step: do not use it)",
        "  saved  r/checkpoints/step-5 (5 updates, verified), on request",
    ]
    assert any(line.startswith("  resume") and "r/checkpoints/step-5" in line for line in lines)


def asked_for(step: int) -> dict[str, Any]:
    made = INCIDENT["action"]["checkpoint"] | {"path": f"/home/a/r/checkpoints/step-{step}", "updates_applied": step}
    action = INCIDENT["action"] | {"checkpoint": made, "exit_code": None}
    return INCIDENT | {"kind": "order.checkpoint", "severity": "info", "action": action}


def test_paths_in_a_sentence_are_as_a_person_would_type_them_here() -> None:
    told = "read the end of /home/a/r/j/logs/rank-1.log (/home/a/r/j/stacks.txt); not /else/home/a/r/x, /home/ab/c"
    assert shortened(told, "/home/a") == "read the end of r/j/logs/rank-1.log (r/j/stacks.txt); not /else/home/a/r/x, /home/ab/c"
    assert shortened(told, "/") == shortened(told, "") == told
