"""The trace that Perfetto and chrome://tracing open: its form, its nesting, its arrows, its bound."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from histories import INCIDENT, block, history

from torch_watchdog.report.history import JobHistory, history_of
from torch_watchdog.report.perfetto import MAX_ARROWS, MAX_EVENTS, thinning, trace_events, trace_metadata
from torch_watchdog_proto.messages import NodeReport, StepTable

PLACE = {"pid": {"type": "integer", "minimum": 0}, "tid": {"type": "integer", "minimum": 0}, "name": {"type": "string", "minLength": 1}}
TIMED = {**PLACE, "ts": {"type": "number", "minimum": 0}, "cat": {"type": "string"}, "args": {"type": "object"}}


def kind(phase: str, required: list[str], **more: Any) -> dict[str, Any]:
    properties = {**(PLACE if phase == "M" else TIMED), "ph": {"const": phase}, "args": {"type": "object"}, **more}
    return {"type": "object", "properties": properties, "required": ["ph", "pid", "tid", "name", *required], "additionalProperties": False}


EVENT = {
    "oneOf": [
        kind("M", ["args"]),
        kind("X", ["ts", "dur"], dur={"type": "number", "minimum": 0}),
        kind("C", ["ts", "args"]),
        kind("i", ["ts", "s"], s={"enum": ["t", "p", "g"]}),
        kind("s", ["ts", "id"], id={"type": "string"}),
        kind("f", ["ts", "id", "bp"], id={"type": "string"}, bp={"const": "e"}),
    ]
}


def events_of(found: JobHistory, max_events: int = MAX_EVENTS) -> list[dict[str, Any]]:
    return json.loads(json.dumps(list(trace_events(found, thinning(found, max_events))), allow_nan=False))  # type: ignore[no-any-return]


def test_every_event_has_the_form_that_the_viewers_read() -> None:
    validator = jsonschema.Draft202012Validator(EVENT)
    events = events_of(history())
    assert [error.message for event in events for error in validator.iter_errors(event)] == []
    assert {event["ph"] for event in events} == {"M", "X", "C", "i", "s", "f"}


def test_a_rank_is_a_track_of_its_node() -> None:
    events = events_of(history())
    nodes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    ranks = {event["args"]["name"]: nodes[event["pid"]] for event in events if event["name"] == "thread_name"}
    assert ranks == {"rank 0": "node node-0", "rank 1": "node node-0", "rank 2": "node node-1", "rank 3": "node node-1"}


def test_phases_lie_within_their_step_and_do_not_overlap() -> None:
    of_rank = [event for event in events_of(history()) if event["ph"] == "X" and event["tid"] == 3 and event["cat"] != "incident"]
    steps = [event for event in of_rank if event["cat"] == "step"]
    assert [event["name"] for event in steps] == ["step 0", "step 1", "step 2", "step 3", "step 4", "step 5, no update"]
    for step in steps:
        inside = [event for event in of_rank if event["cat"] == "phase" and step["ts"] <= event["ts"] < step["ts"] + step["dur"]]
        assert [(event["name"], event["dur"]) for event in inside] == [
            ("load", 100_000),
            ("forward", 300_000),
            ("backward and waiting", 600_000),
        ]
        assert inside[-1]["ts"] + inside[-1]["dur"] <= step["ts"] + step["dur"]


def test_an_update_that_was_timed_is_the_end_of_its_step_on_a_cpu_and_no_phase_of_a_gpu() -> None:
    for gpu, names in (("", ["load", "forward", "backward and waiting", "update"]), ("GPU-1", ["load", "forward", "backward and waiting"])):
        made = history(ranks=1, backward_ns=(600_000_000,) * 6, update_ns=(200_000_000,) * 6, gpu=gpu)
        phases = [event for event in events_of(made) if event["ph"] == "X" and event["cat"] == "phase"]
        assert [event["name"] for event in phases] == names * 6
        begins = [event["ts"] for event in phases]
        assert begins == sorted(begins)
        assert sum(event["dur"] for event in phases) == 6_000_000


def test_arrows_lead_from_the_culprit_to_each_rank_that_it_reached() -> None:
    events = events_of(history())
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 3
    assert {event["tid"] for event in starts.values()} == {2} and {event["tid"] for event in ends.values()} == {1, 3, 4}
    slices = [event for event in events if event["ph"] == "X" and event["cat"] == "incident"]
    for arrow in (*starts.values(), *ends.values()):  # an arrow hangs on a slice, or is not drawn
        assert any(
            one["tid"] == arrow["tid"] and one["pid"] == arrow["pid"] and one["ts"] <= arrow["ts"] <= one["ts"] + one["dur"]
            for one in slices
        )


def test_loss_memory_and_power_are_counters() -> None:
    names = {event["name"] for event in events_of(history()) if event["ph"] == "C"}
    assert {"loss, rank 0", "memory, MiB, rank 3", "GPU 2 power, W", "GPU 2 memory, MiB"} <= names


def test_a_loss_that_is_no_number_is_no_counter_and_the_trace_stays_json() -> None:
    events = events_of(history(loss=(float("nan"),) * 6))
    assert not [event for event in events if event["name"].startswith("loss")]


def test_an_incident_without_a_rank_is_shown_for_all() -> None:
    (instant,) = [event for event in events_of(history(incidents=({**INCIDENT, "origin": {"rank": None}},))) if event["ph"] == "i"]
    assert instant["s"] == "g"


def test_a_long_run_is_thinned_to_the_bound_keeps_the_fault_and_says_so() -> None:
    long = history(3_001, incidents=({**INCIDENT, "step": 2_999},))
    events = events_of(long, 4_000)
    assert len(events) < 6_000
    assert "step 2999" in {event["name"] for event in events} and "step 2998" not in {event["name"] for event in events}
    assert trace_metadata(long, thinning(long, 4_000))["kept"] == "every 13. step"


def test_a_trace_of_many_ranks_and_incidents_stays_within_its_bound_in_events_and_bytes() -> None:
    ranks, bound = 512, 8_000
    incidents = tuple(
        {**INCIDENT, "id": str(step), "step": step, "origin": {"rank": step}, "ranks_affected": list(range(ranks))} for step in range(60)
    )
    events = events_of(history(64, ranks=ranks, incidents=incidents), bound)
    names = 2 * ranks + ranks // 2 + 1
    assert len(events) <= bound + names + 5 * MAX_ARROWS
    assert {f"step {step}" for step in range(60)} <= {event["name"].partition(",")[0] for event in events if event["ph"] == "X"}
    mean_bytes = sum(len(json.dumps(event, separators=(",", ":"))) for event in events) / len(events)
    assert mean_bytes * MAX_EVENTS < 80e6, "what viewers are told to open is larger than they open"


def test_attempts_are_processes_of_their_own() -> None:
    reports = [("n", "s", NodeReport(seq=1, time_ns=1, steps=StepTable.of((block(0, 3), block(0, 2, attempt=1)))))]
    names = [event["args"]["name"] for event in events_of(history_of("j", {}, reports)) if event["name"] == "process_name"]
    assert names == ["job j", "node n, attempt 0", "node n, attempt 1"]
