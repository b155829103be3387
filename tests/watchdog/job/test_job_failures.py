"""Ranks that fail: who was first, what the others were told, when the launcher is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from job_harness import BAD_TOKEN, Run, ended, exception, hold, orders, steps, stop_at

from torch_watchdog.job.events import (
    RankGone,
    SendOrder,
)
from torch_watchdog.job.rescues import HEAD_START_S
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.rescue_words import Failed, Free, Freed, Look, Release
from torch_watchdog_proto.stop.rescue import FREE_TIMEOUT_S


def test_the_first_rank_to_fail_is_the_origin_and_the_others_are_affected() -> None:
    run = Run(world_size=3)
    run.hello(0, 1, 2)
    run.report(steps(2, 0, [1.0, 1.0]))
    run.report(events=(ended(2, 7, exit_code=3), ended(0, 8, exit_code=1), ended(1, 9, signal=15)))
    (incident,) = run.incidents
    assert (incident["kind"], incident["origin"]["rank"], incident["step"], incident["ranks_affected"]) == ("rank.exception", 2, 2, [0, 1])


def test_a_rank_that_blames_its_peer_is_not_the_first_however_early_it_ended() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(events=(exception(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:4242"), ended(0, 2, exit_code=1)))
    assert run.kinds == []
    run.report(events=(exception(1, 3, "ValueError: no image"), ended(1, 4, exit_code=1)))
    (incident,) = run.incidents
    assert (incident["origin"]["rank"], incident["summary"]) == (1, "rank 1: ValueError: no image")


def test_the_others_are_asked_where_they_are_once_and_before_they_are_freed_whoever_speaks_first() -> None:
    run = Run(world_size=3)
    run.hello(0, 1, 2)
    told = run.say(Failed(rank=2, step=3, time_ns=2, updates_applied=3, text="RuntimeError: Connection closed by peer [127.0.0.1]:4242"))
    assert orders(told) == [(0, Look), (1, Look), (0, Free), (1, Free), (2, Free)]
    (why,) = {effect.tell.order.reason for effect in told if isinstance(effect, SendOrder) and isinstance(effect.tell.order, Free)}
    assert why.startswith("rank 2 lost another: RuntimeError: Connection closed by peer")
    told = run.say(Failed(rank=0, step=3, time_ns=1, updates_applied=3, text="RuntimeError: Timed out waiting 8000ms for send operation"))
    assert Look not in [kind for _, kind in orders(told)]


def test_an_exit_of_the_scripts_own_waits_for_the_end_of_a_rank_that_had_gone_silent() -> None:
    """That script had caught what it met when rank 1 was killed, whose end its node sees a little later."""
    run = Run()
    run.hello(0, 1)
    run.handle(RankGone(attempt=0, rank=1, pid=101))
    told = run.say(Failed(rank=0, step=5, time_ns=1_000_000_000, updates_applied=5, text="SystemExit: 1", chain=("SystemExit: 1",)))
    assert run.kinds == []
    assert (0, Free) in orders(told)  # it waits at its end, and may hold all
    run.report(events=(replace(ended(1, 1, signal=9), time_ns=1_400_000_000),))
    run.say(Freed(rank=0, generation=1, updates_applied=5, holds="nothing", why="its update was under way"))
    assert [(incident["kind"], incident["origin"]["rank"]) for incident in run.incidents] == [("rank.died", 1)]


def test_the_exception_is_known_though_it_was_read_after_the_end() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.report(events=(ended(0, 1, exit_code=1), exception(0, 2, "KeyError: 'x'")))
    assert run.incidents[0]["evidence"]["exception"] == {"text": "KeyError: 'x'"}
    assert "other rank" not in run.incidents[0]["cause"] + run.incidents[0]["fix"]  # there is none


def test_only_a_batch_that_was_kept_is_named_and_else_what_was_being_made() -> None:
    told, fixes = [], []
    for bundle, fetching in (("bundles/0-0.safetensors", ""), ("", "the batch of samples 3, 5 of the data set"), ("", "a batch")):
        run = Run(world_size=1)
        run.hello(0)
        run.say(Failed(rank=0, step=3, time_ns=1, updates_applied=3, text="ValueError: no image", bundle=bundle, fetching=fetching))
        run.report(events=(ended(0, 1, exit_code=1),))
        (incident,) = run.incidents
        told.append((incident["evidence"]["bundle"], incident["cause"].partition("raised this itself")[2]))
        fixes.append(incident["fix"])
    assert [bundle for bundle, _ in told] == ["bundles/0-0.safetensors", None, None]
    made = " while its loader made "
    assert [cause.partition(";")[0] for _, cause in told] == ["", f"{made}the batch of samples 3, 5 of the data set", f"{made}a batch"]
    assert ["a run that goes on makes the same batch again" in fix for fix in fixes] == [False, True, False]


def test_a_failure_in_the_first_step_after_a_checkpoint_names_the_updates_before_it() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.say(Failed(rank=0, step=0, time_ns=1, updates_applied=12, text="ValueError: no image"))
    run.report(events=(ended(0, 1, exit_code=1),))
    assert (run.incidents[0]["step"], run.incidents[0]["framework_step"]) == (0, 12)


OWN = Failed(rank=0, step=5, time_ns=1, updates_applied=5, text="ValueError: a mistake of this script", chain=("ValueError: a mistake",))
GPU_LOST = "RuntimeError: CUDA error: unspecified launch failure"
LOST = replace(OWN, text="RuntimeError: Connection closed by peer [127.0.0.1]:4242", chain=())


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize(
    ("failed", "end", "kind", "said"),
    [
        (OWN, {"exit_code": 1}, "rank.exception", "rank 0, in step 5: ValueError: a mistake"),
        (replace(OWN, text="TimeoutError: HTTPSConnectionPool: Read timed out."), {"exit_code": 1}, "rank.exception", "Read timed out"),
        (None, {"signal": 9}, "rank.died", "killed by SIGKILL"),
        (None, {"signal": 11}, "rank.died", "killed by SIGSEGV"),
        (None, {"exit_code": 3}, "rank.exception", "3"),
    ],
)
def test_a_rank_that_fails_by_itself_beside_the_bad_batch_of_another_is_told(
    policy: m.Policy, failed: Failed | None, end: dict[str, int], kind: str, said: str
) -> None:
    run = Run(policy=policy)
    run.hello(0, 1)
    run.report(steps(0, 0, [1.0] * 5), steps(1, 0, [1.0] * 5))
    run.say(hold(1, 5))
    if failed is not None:
        run.say(failed)
    run.report(events=(ended(0, 1, **end),))
    run.wait(5)
    assert run.kinds == ["batch.index_out_of_range", kind]
    assert said in run.incidents[1]["summary"] and run.incidents[1]["origin"]["rank"] == 0 and run.incidents[1]["ranks_affected"] == [1]
    assert run.end(1) == (65 if policy == "stop" else None)  # the batch would have stopped the job; to leave it out would not


def test_what_a_rank_raises_by_itself_is_told_though_it_was_heard_of_after_the_verdict() -> None:
    run = Run(world_size=4)
    run.hello(0, 1, 2, 3)
    told = []
    for rank, text in enumerate(("ValueError: a mistake of this script", "IndexError: Target 7", "KeyError: 'x'", LOST.text)):
        run.say(replace(OWN, rank=rank, time_ns=1 + rank * 100_000_000, text=text))
        run.wait(20)
        told.append((run.incidents[0]["cause"], run.incidents[0]["fix"]))
    assert run.kinds == ["rank.exception"] and run.incidents[0]["ranks_affected"] == [1, 2, 3]
    assert told[0][1].endswith("what any other rank raises follows from this one") and "rank 1" not in told[0][0]
    for cause, fix in told[2:]:
        one, other = (
            "rank 1 raised an error of its own after it: IndexError: Target 7",
            "rank 2 raised an error of its own after it: KeyError: 'x'",
        )
        assert f"; {one}; {other}" in cause and cause.count(one) == cause.count(other) == 1 and LOST.text not in cause
        assert "is their own, and does not follow" in fix


def test_what_another_rank_raises_by_itself_after_a_bad_batch_is_told_with_it() -> None:
    run = Run()
    run.hello(0, 1)
    run.say(m.Refused(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
    run.say(replace(OWN, rank=1, text="BadBatchError: refused"))
    run.say(replace(OWN, time_ns=200_000_000))
    run.report(events=(ended(0, 1, exit_code=1), ended(1, 2, exit_code=1)))
    run.wait(5)
    (batch,) = run.incidents
    assert batch["kind"] == "batch.index_out_of_range" and batch["ranks_affected"] == [0]
    assert f"ank 0 raised an error of its own after it: {OWN.text}" in batch["cause"] and "BadBatchError" not in batch["cause"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"step": 0, "between": True}, "it had trained nothing yet"),
        ({"text": "SystemExit: 3", "chain": ("SystemExit: 3",)}, "it ended by an exit of the script's own, which is not held back"),
        ({"text": GPU_LOST, "chain": (GPU_LOST,)}, "it has met an error of its GPU, which answers no more"),
        ({"between": True}, "it failed between two steps, where what belongs to its last one may be still to come"),
    ],
)
def test_why_one_that_trains_alone_saves_nothing_is_said_as_it_was(more: dict[str, Any], why: str) -> None:
    run = Run(world_size=1)
    run.hello(0)
    told = run.say(replace(OWN, **more))
    run.report(events=(ended(0, 1, exit_code=1),))
    assert Free not in [kind for _, kind in orders(told)]
    assert run.incidents[0]["cause"].endswith(f"; nothing was saved: {why}")


@pytest.mark.parametrize(("failed", "end"), [(LOST, {"exit_code": 1}), (None, {"exit_code": 1}), (None, {"signal": 15})])
def test_a_rank_that_only_suffers_from_the_bad_batch_of_another_is_told_as_affected(failed: Failed | None, end: dict[str, int]) -> None:
    run = Run()
    run.hello(0, 1)
    run.say(m.Refused(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
    if failed is not None:
        run.say(failed)
    run.report(events=(ended(0, 1, **end), ended(1, 2, exit_code=1)))
    run.wait(5)
    assert [(found["kind"], found["ranks_affected"]) for found in run.incidents] == [("batch.index_out_of_range", [0])]


@pytest.mark.parametrize(
    ("behind", "text", "kinds"),
    [
        (0, OWN.text, []),
        (12, OWN.text, ["rank.exception"]),
        (12, "AcceleratorError: CUDA error: device-side assert triggered", []),
        (200, "AcceleratorError: CUDA error: device-side assert triggered", ["rank.exception"]),
    ],
)
def test_a_batch_that_was_only_observed_is_not_why_its_rank_fails_once_it_has_gone_on(behind: int, text: str, kinds: list[str]) -> None:
    """Only a device may be behind what its rank is at."""
    run = Run(policy="observe")
    run.hello(0, 1)
    run.say(m.Noticed(rank=0, step=5, micro_step=0, violation=BAD_TOKEN))
    run.say(replace(OWN, step=5 + behind, text=text))
    run.report(events=(ended(0, 1, exit_code=1),))
    run.wait(5)
    assert run.kinds == ["batch.index_out_of_range", *kinds]


def test_a_batch_that_was_only_observed_names_what_its_own_rank_kept_of_it() -> None:
    run = Run(policy="observe")
    run.hello(0, 1)
    run.say(m.Noticed(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
    run.say(
        Failed(
            rank=0, step=5, time_ns=9, updates_applied=5, text="RuntimeError: Connection closed by peer", bundle="bundles/0-0.safetensors"
        )
    )
    run.say(Failed(rank=1, step=5, time_ns=1, updates_applied=5, text="IndexError: index out of range", bundle="bundles/0-1.safetensors"))
    run.report(events=(ended(0, 2, exit_code=1), ended(1, 1, exit_code=1)))
    run.wait(5)
    assert [(found["kind"], found["evidence"]["bundle"]) for found in run.incidents] == [
        ("batch.index_out_of_range", "bundles/0-1.safetensors")
    ]


def test_a_rank_that_told_its_end_and_whose_status_nobody_could_read_has_ended_well() -> None:
    """A held batch is the last thing that it had noted as an error; the other rank goes on."""
    run = Run()
    run.hello(0, 1)
    run.report(events=(exception(0, 1, "step 39: held: batch[0, 0] = 777"),))
    run.say(m.Finished(rank=0, passed=69))
    told = run.report(events=(ended(0, 2),))
    run.wait(60)
    assert run.kinds == [] and orders(told) == []


@pytest.mark.parametrize("done", [(0, 1), (1,), (0,), ()])
@pytest.mark.parametrize("first", [0, 1])
def test_a_training_that_had_ended_before_a_signal_ended_its_ranks_is_told_as_that_and_only_that(done: tuple[int, ...], first: int) -> None:
    """One that was not done yet had something to do, in whatever order they are heard of."""
    run = Run()
    run.hello(0, 1)
    run.report(steps(0, 0, [1.0] * 5), steps(1, 0, [1.0] * 5))
    for rank in done:
        run.say(m.Finished(rank=rank, passed=4))
    run.report(events=(ended(first, 1, signal=15),))
    run.wait(5)
    run.report(events=(ended(1 - first, 2, signal=15),))
    run.wait(5)
    (incident,) = run.incidents
    is_over = done == (0, 1)
    assert incident["summary"].endswith("ended by SIGTERM from outside" + ", after its training was over" * is_over)
    assert ("the training had come to its own end by then" in incident["cause"], "no need to launch it again" in incident["fix"]) == (
        is_over,
        is_over,
    )
    assert ("look at who stopped the job, and why" in incident["fix"]) is not is_over


@pytest.mark.parametrize("other_was_over", [True, False])
def test_an_abort_behind_the_training_is_told_as_that_unless_another_rank_had_something_to_do(other_was_over: bool) -> None:
    run = Run()
    run.hello(0, 1)
    run.report(steps(0, 0, [1.0] * 5), steps(1, 0, [1.0] * 5))
    run.say(m.Finished(rank=1, passed=4))
    if other_was_over:
        run.say(m.Finished(rank=0, passed=4))
    run.report(events=(ended(1, 1, signal=6),))
    run.wait(5)
    run.report(events=(ended(0, 2, signal=15),))
    run.wait(5)
    (incident,) = run.incidents
    assert incident["summary"].endswith("on its way out, after its training was over") is other_was_over
    assert ("no need to launch it again" in incident["fix"]) is other_was_over
    assert "time.sleep(0.5)" in incident["fix"]


def test_a_rank_that_raised_and_whose_status_nobody_could_read_has_failed() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.say(Failed(rank=0, step=3, time_ns=1, updates_applied=3, text="KeyError: 'x'"))
    run.say(m.Finished(rank=0, passed=2))
    run.report(events=(ended(0, 1),))
    run.wait(60)
    assert run.kinds == ["rank.exception"]


def test_a_killed_rank_is_named_with_its_signal_after_three_seconds_though_its_peers_hang() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(events=(ended(1, 1, signal=9),))
    run.wait(2.9)
    assert run.kinds == []
    run.wait(0.2)
    (incident,) = run.incidents
    assert incident["kind"] == "rank.died" and "SIGKILL" in incident["summary"] and incident["origin"]["rank"] == 1


def released(run: Run) -> list[int]:
    return [effect.tell.rank for effect in run.effects if isinstance(effect, SendOrder) and isinstance(effect.tell.order, Release)]


def test_the_launcher_is_told_in_time_though_the_healthy_rank_never_says_a_word() -> None:
    """Nothing in a rank is needed for it: its thread may be blocked for ever."""
    run = Run()
    run.hello(0, 1)
    run.report(events=(ended(1, 1, signal=9),))
    run.wait(FREE_TIMEOUT_S - 0.1)
    assert released(run) == []
    run.wait(0.2)
    assert released(run) == [1]
    run.wait(HEAD_START_S)
    assert released(run) == [1, 0]
    assert "no word from rank 0" in run.incidents[0]["cause"]


def test_a_rank_that_was_stopped_is_told_as_why_nothing_was_saved() -> None:
    """Only the kernel knows: it answers nothing."""
    run = Run()
    run.hello(0, 1)
    run.say(replace(OWN, rank=1))
    run.report(events=(m.RankEvent(rank=0, attempt=0, pid=100, kind="state", time_ns=1, order=1, text="T"),))
    run.wait(FREE_TIMEOUT_S + 0.1)
    (incident,) = run.incidents
    assert "no word from rank 0; rank 0 is stopped (state T: by SIGSTOP" in incident["cause"]
    assert incident["cause"].endswith("it could neither answer nor save, and what it holds is lost")


def test_the_others_wait_for_the_end_of_the_rank_that_failed_first() -> None:
    """It may be tearing down for seconds: a launcher names the rank whose process it sees end first."""
    run = Run()
    run.hello(0, 1)
    run.say(Failed(rank=1, step=5, updates_applied=5, time_ns=1, text="ValueError: x", chain=("ValueError: x",), where="", between=False))
    run.wait(FREE_TIMEOUT_S + 0.1)
    assert released(run) == [1]
    run.wait(HEAD_START_S + 1)
    assert released(run) == [1]
    run.report(events=(ended(1, 1, exit_code=1),))
    run.wait(HEAD_START_S + 0.1)
    assert released(run) == [1, 0]


def test_what_became_of_the_others_is_said_once_and_after_a_sentence_as_one() -> None:
    run = Run()
    run.hello(0, 1)
    refused = m.Refused(rank=1, step=0, micro_step=0, violation=replace(BAD_TOKEN, cause="The table has 40 rows."))
    run.say(refused)
    run.report(events=(exception(1, 1, "BadBatchError: ids[0] = 51"), ended(1, 1, exit_code=1)))
    run.wait(FREE_TIMEOUT_S + HEAD_START_S)
    run.report(events=(exception(0, 2, "RuntimeError: Connection closed by peer"), ended(0, 2, exit_code=1)))
    run.wait(5)
    assert re.fullmatch(r"The table has 40 rows\. Nothing was saved: [^.]*\.", run.incidents[0]["cause"])


def test_ranks_that_were_asked_to_end_are_a_warning() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(events=(ended(0, 1, signal=15), ended(1, 2, signal=15)))
    assert [incident["severity"] for incident in run.incidents] == ["warning"]


def test_ranks_that_one_signal_has_ended_and_that_are_heard_of_one_after_the_other_are_one_warning() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(events=(ended(0, 1, signal=15),))
    run.wait(30)
    run.report(events=(ended(1, 2, signal=15),))
    run.wait(30)
    assert [(incident["severity"], incident["origin"]["rank"]) for incident in run.incidents] == [("warning", 0)]


def test_ranks_that_leave_by_order_or_end_well_have_not_failed() -> None:
    run = Run()
    run.hello(0, 1)
    stop_at(run, 5)
    run.report(events=(ended(0, 1, signal=6), ended(1, 2, exit_code=0)))
    run.wait(5)
    assert run.kinds == ["batch.index_out_of_range"]


def test_a_failing_command_names_the_rank_whose_end_nobody_saw() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.report(events=(ended(0, 1),))
    assert run.kinds == []
    run.end(3)
    assert [(i["kind"], "exit code 3" in i["cause"]) for i in run.incidents] == [("rank.exception", True)]


@pytest.mark.parametrize(
    ("failed", "end", "fix"),
    [
        (("ValueError: no image", "train.py:7"), {"exit_code": 1}, "read the end of /runs/job/logs/rank-1.log;"),
        (("SystemExit: 3", "train.py:55"), {"exit_code": 3}, "look at train.py:55, where the script asked for this exit;"),
        (None, {"exit_code": 3}, "what it printed, if anything, is in /runs/job/logs/rank-1.log;"),
        (None, {"signal": 11}, "read the end of /runs/job/logs/rank-1.log, if it printed anything, and `dmesg`"),
        (None, {"signal": 9}, "look for what killed it: `dmesg` on node for the kernel's reason, then the scheduler;"),
        (("ValueError: no image", "train.py:7"), {"signal": 11}, "read the end of /runs/job/logs/rank-1.log; what any other"),
    ],
)
def test_whoever_looks_into_a_failure_is_sent_to_what_is_there_by_a_path_that_works_anywhere(
    failed: tuple[str, str] | None, end: dict[str, int], fix: str
) -> None:
    """The log of a rank that left by sys.exit() or os._exit() may be empty."""
    run = Run()
    run.hello(0, 1)
    if failed is not None:
        run.say(Failed(rank=1, step=3, time_ns=1, updates_applied=3, text=failed[0], where=failed[1]))
    run.report(events=(ended(1, 1, **end), ended(0, 2, signal=15)))
    (incident,) = run.incidents
    assert fix in incident["fix"]
    if failed is None and "exit_code" in end:
        assert "as `raise SystemExit`, os._exit() or native code does" in incident["fix"] and "it showed no exception" in incident["cause"]


@pytest.mark.parametrize(
    ("chain", "asked"),
    [
        (("ValueError: a fault",), Free),
        (("ValueError: a fault", "SystemExit: 1"), m.Leave),
        (("AcceleratorError: CUDA error: device-side assert triggered",), m.Leave),
    ],
)
def test_a_rank_that_raises_alone_is_asked_for_what_it_held_where_it_may_hold_something(chain: tuple[str, ...], asked: type) -> None:
    run = Run(world_size=1)
    run.hello(0)
    effects = run.say(Failed(rank=0, step=5, updates_applied=5, time_ns=1, text=chain[0], chain=chain))
    assert orders(effects)[0] == (0, asked)


ASSERTED = "Indexing.cu:1369: indexSelectSmallIndex: block: [0,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed."


@pytest.mark.parametrize(
    ("printed", "signal", "on_device", "step"),
    [
        (ASSERTED, 6, 27, 4),
        ("terminate called: CUDA error: an illegal memory access was encountered", 6, 28, 5),
        (ASSERTED, 6, None, 6),  # an older node, or no gate on its device
        (ASSERTED, 6, 29, 5),  # no batch of step 6 was handed over
        ("", 9, 27, 6),  # what killed it did not wait for its device
        ("Segmentation fault", 11, 27, 6),
    ],
)
def test_a_failure_on_a_device_that_ends_the_process_is_laid_to_the_step_of_the_device(
    printed: str, signal: int, on_device: int | None, step: int
) -> None:
    """Python had launched six steps of a run that had resumed after 23 updates."""
    run = Run()
    run.hello(0, 1)
    of_six = replace(steps(1, 0, [1.0] * 6), updates_applied=tuple(range(24, 30)))
    said = replace(exception(1, 1, printed), kind="log", level="warning")
    run.report(of_six, events=(said, replace(ended(1, 2, signal=signal), updates_on_device=on_device)))
    run.wait(60)
    assert [(found["origin"]["rank"], found["step"]) for found in run.incidents] == [(1, step)]


def test_so_it_is_where_python_had_noted_the_error_and_was_ended_before_it_could_tell_it() -> None:
    """What fits a rank on an H200 that SIGABRT had ended and that was laid to the step behind the device's; its note was not kept."""
    run = Run()
    run.hello(0, 1)
    said = replace(exception(1, 1, ASSERTED), kind="log", level="warning")
    noted = exception(1, 1, "AcceleratorError: CUDA error: device-side assert triggered")
    run.report(
        replace(steps(1, 0, [1.0] * 6), updates_applied=tuple(range(1, 7))),
        events=(said, noted, replace(ended(1, 2, signal=6), updates_on_device=4)),
    )
    run.wait(60)
    assert [found["step"] for found in run.incidents] == [4]
