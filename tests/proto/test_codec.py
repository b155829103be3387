"""The codec: what goes onto the wire comes back as it was, and what does not keep the contract is named."""

from __future__ import annotations

import dataclasses
import math
import string
import types
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_watchdog_proto import codec, envelopes, messages
from torch_watchdog_proto.v1 import control_pb2, telemetry_pb2

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
# What fits every integer field, whatever its width and sign.
COUNT = st.integers(0, 2**31 - 1)
NUMBER = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.sampled_from(["nan", "inf", "-inf"]))
SECONDS = st.floats(-4e9, 4e9)
BY_NAME = {"world_size": st.integers(0, 1 << 16)} | dict.fromkeys(
    ("timeout_s", "grace_s", "started_s", "last_seen_s", "step_time_s"), SECONDS
)
OBJECT = st.dictionaries(st.text(string.ascii_letters, max_size=5), st.one_of(st.integers(), TEXT, st.booleans(), st.none()), max_size=3)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field with this type hint may hold."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        value = NUMBER if len(kinds) > 1 and str in kinds else st.one_of(*map(values_of, kinds))
        return st.one_of(st.none(), value) if type(None) in args else value
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if hint is Mapping or origin is Mapping:
        return OBJECT
    if dataclasses.is_dataclass(hint):
        return instances_of(typing.cast("type[Any]", hint))
    return {int: COUNT, float: st.floats(allow_nan=False), bool: st.booleans(), str: TEXT}[hint]


def instances_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    if cls is messages.StepBlock:
        return step_blocks()
    if cls is messages.StepTable:
        return st.lists(step_blocks(), max_size=3).map(messages.StepTable.of)
    hints = typing.get_type_hints(cls)
    fields = {
        field.name: BY_NAME[field.name] if field.name in BY_NAME else values_of(hints[field.name]) for field in dataclasses.fields(cls)
    }
    return st.builds(cls, **fields)


def columns(names: str, hints: Mapping[str, Any], length: int) -> st.SearchStrategy[dict[str, Any]]:
    def column(name: str) -> st.SearchStrategy[Any]:
        return st.lists(values_of(typing.get_args(hints[name])[0]), min_size=length, max_size=length).map(tuple)

    return st.fixed_dictionaries({name: column(name) for name in names.split()})


@st.composite
def step_blocks(draw: st.DrawFn) -> messages.StepBlock:
    hints = typing.get_type_hints(messages.StepBlock)
    micro, steps = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    block = draw(columns("micro_step micro_of_step micro_time_ns loader_ns loss loss_known evaluation", hints, micro))
    names = "step step_time_ns step_ns vetoed allocated_bytes reserved_bytes peak_bytes updates_applied"
    block |= draw(columns(names, hints, steps))
    tensors = tuple(draw(st.lists(tensor_columns(micro), max_size=2)))
    plain = {name: draw(COUNT) for name in ("rank", "attempt", "pid", "first_record", "lost_records")}
    return messages.StepBlock(**plain, **block, tensors=tensors)


@st.composite
def tensor_columns(draw: st.DrawFn, micro: int) -> messages.TensorColumns:
    rows = tuple(draw(st.lists(st.integers(0, micro - 1), max_size=3)))
    hints = typing.get_type_hints(messages.TensorColumns)
    values = draw(columns("low high negatives ignored finite shapes", hints, len(rows)))
    return messages.TensorColumns(key=draw(TEXT), dtype=draw(TEXT), rows=rows, **values)


def one_of(union: Any) -> st.SearchStrategy[Any]:
    return st.one_of(*map(instances_of, typing.get_args(union)))


def through(message: Any) -> Any:
    """The same message after it was bytes."""
    return type(message).FromString(message.SerializeToString())


@given(one_of(envelopes.NodeSays))
def test_what_a_node_says_comes_back_as_it_was(says: envelopes.NodeSays) -> None:
    assert codec.read_node_message(through(codec.node_message(says))) == says


@given(one_of(envelopes.DaemonAnswers))
def test_what_the_daemon_answers_comes_back_as_it_was(answer: envelopes.DaemonAnswers) -> None:
    assert codec.read_daemon_message(through(codec.daemon_message(answer))) == answer


@settings(max_examples=200)
@given(st.builds(envelopes.RankSaid, attempt=COUNT, message=one_of(messages.RankMessage)))
def test_what_a_rank_says_comes_back_as_it_was(said: envelopes.RankSaid) -> None:
    assert codec.read_control_message(through(codec.control_message(said))) == said


@given(st.one_of(instances_of(envelopes.ControlHello), instances_of(envelopes.RankLost)))
def test_what_a_node_says_of_its_ranks_comes_back_as_it_was(says: envelopes.ControlUp) -> None:
    assert codec.read_control_message(through(codec.control_message(says))) == says


@given(st.builds(envelopes.TellRank, attempt=COUNT, rank=COUNT, order=one_of(messages.Order)))
def test_an_order_comes_back_as_it_was(tell: envelopes.TellRank) -> None:
    assert codec.read_tell_rank(through(codec.tell_rank(tell))) == tell


@given(st.one_of(instances_of(envelopes.JobStatus), instances_of(envelopes.OrderAnswer), step_blocks()))
def test_what_a_query_shows_comes_back_as_it_was(value: Any) -> None:
    assert codec.read_plain_message(through(codec.plain_message(value))) == value


@given(TEXT, TEXT, instances_of(messages.NodeReport))
def test_a_stored_report_comes_back_as_it_was(node: str, session: str, report: messages.NodeReport) -> None:
    assert codec.read_stored_report(codec.stored_report(node, session, report)) == (node, session, report)


@given(TEXT, TEXT, instances_of(messages.NodeReport))
def test_a_report_is_stored_from_the_message_that_brought_it_as_if_it_were_written_anew(
    node: str, session: str, report: messages.NodeReport
) -> None:
    stored = codec.stored_as_received(node, session, through(codec.node_message(report)))
    assert codec.read_stored_report(stored) == (node, session, report)


def test_a_nan_loss_stays_a_nan() -> None:
    block = small_block(loss=(float("nan"),), loss_known=(True,))
    (loss,) = codec.read_plain_message(through(codec.plain_message(block))).loss
    assert loss != loss


def test_steps_and_times_are_small_on_the_wire_because_they_are_differences() -> None:
    count = 1000
    start = 1_800_000_000_000_000_000
    block = small_block(
        micro_step=(0,) * count,
        micro_of_step=tuple(range(10**6, 10**6 + count)),
        micro_time_ns=tuple(start + 1000 * step for step in range(count)),
    )
    assert len(codec.plain_message(block).SerializeToString()) < 6 * count


def small_block(**columns: Any) -> messages.StepBlock:
    fields: dict[str, Any] = {"rank": 0, "attempt": 0, "pid": 1, "first_record": 1, "micro_step": (0,), "micro_of_step": (0,)} | columns
    return messages.StepBlock(**fields)


@pytest.mark.parametrize(
    "value",
    [
        small_block(loss=(1.0, 2.0)),
        small_block(step=(1, 2), step_ns=(5,)),
        small_block(micro_step=(0,) * (codec.MAX_ITEMS + 1)),
        small_block(tensors=(messages.TensorColumns(key="x", dtype="int64", rows=(1,), low=(), high=(), negatives=(), ignored=(), finite=(), shapes=()),)),
        small_block(rank=-1),
        small_block(rank=2**40),
        small_block(micro_of_step=(2**80,)),
        small_block(rank="one"),
        envelopes.OrderAnswer(accepted=False, text="x" * (codec.MAX_TEXT + 1)),
        envelopes.OrderAnswer(accepted=False, text="\ud800"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_sender_is_told_of_a_value_that_does_not_keep_the_contract(value: Any) -> None:
    with pytest.raises(codec.MalformedMessageError):
        codec.plain_message(value)


def received(**fields: Any) -> Any:
    block = telemetry_pb2.StepBlock(rank=0, micro_step_delta=[0], micro_of_step_delta=[0])
    for name, value in fields.items():
        getattr(block, name).extend(value)
    return block


@pytest.mark.parametrize(
    "message",
    [
        received(loss=[1.0, 2.0]),
        received(step_delta=[1, 1], step_ns=[1]),
        received(tensors=[telemetry_pb2.TensorColumns(rows_delta=[7])]),
        received(tensors=[telemetry_pb2.TensorColumns(rows_delta=[0], ndim=[2], dims=[3])]),
        received(loss=[0.0] * (codec.MAX_ITEMS + 1)),
        received(loss_known=[True]),
        received(step_delta=[-1]),
        received(step_delta=[5, -6]),
        received(step_delta=[0, 0], updates_applied_delta=[2**62, 2**62]),
        received(loader_ns=[2**63]),
    ],
)
def test_a_receiver_refuses_a_block_whose_columns_do_not_fit(message: Any) -> None:
    with pytest.raises(codec.MalformedMessageError):
        codec.read_plain_message(message)


def table(**columns: Any) -> Any:
    whole = {
        "rank": [0, 1],
        "attempt": [0, 0],
        "pid": [1, 2],
        "first_record": [1, 1],
        "lost_records": [0, 0],
        "gpu": ["", ""],
        "tokens": [0, 0],
    }
    counts = {"norms_of_shard": [False, False], "num_micro_steps": [1, 0], "num_steps": [0, 1], "micro_step_delta": [0], "step_delta": [3]}
    return telemetry_pb2.NodeMessage(report=telemetry_pb2.NodeReport(steps=telemetry_pb2.StepTable(**(whole | counts | columns))))


def test_a_table_is_read_as_the_blocks_of_its_ranks() -> None:
    report = codec.read_node_message(table())
    assert [(block.rank, block.micro_step, block.step) for block in report.blocks] == [(0, (0,), ()), (1, (), (3,))]


@pytest.mark.parametrize(
    "columns",
    [
        {"num_steps": [1, 1]},
        {"num_micro_steps": [2**31, 2**31]},
        {"num_steps": [1]},
        {"gpu": []},
        {"step_ns": [1, 1]},
        {"loss": [1.0] * (codec.MAX_ITEMS + 1)},
        {"tensors": [telemetry_pb2.TensorColumns(rows_delta=[1])]},
        {"tensors": [telemetry_pb2.TensorColumns(rows_delta=[-1])]},
        {"loss_known": [True]},
        {"first_record": [1, 2**63]},
    ],
    ids=str,
)
def test_a_receiver_refuses_a_table_whose_columns_do_not_fit(columns: dict[str, Any]) -> None:
    with pytest.raises(codec.MalformedMessageError):
        codec.read_node_message(table(**columns))


@pytest.mark.parametrize(
    "message",
    [
        control_pb2.ControlUp(),
        control_pb2.ControlUp(rank_said=control_pb2.RankSaid(rank=1)),
        control_pb2.ControlUp(rank_said=control_pb2.RankSaid(ack=control_pb2.Ack(phase="dancing"))),
        control_pb2.ControlUp(rank_said=control_pb2.RankSaid(hello=control_pb2.RankHello(world_size=10**9))),
        control_pb2.ControlUp(rank_said=control_pb2.RankSaid(hold=control_pb2.Hold(timeout_s=math.nan))),
        control_pb2.ControlUp(rank_said=control_pb2.RankSaid(hold=control_pb2.Hold(timeout_s=math.inf))),
        control_pb2.ControlUp(rank_said=control_pb2.RankSaid(hold=control_pb2.Hold(step=2**63))),
    ],
)
def test_a_receiver_refuses_an_empty_envelope_an_unknown_word_and_a_number_that_cannot_be(message: Any) -> None:
    with pytest.raises(codec.MalformedMessageError):
        codec.read_control_message(message)


@pytest.mark.parametrize("manifest", ["[1]", "{", "[" * 20_000, '"text"'])
def test_a_receiver_refuses_a_manifest_that_is_no_json_object(manifest: str) -> None:
    message = control_pb2.TellRank(write_committed=control_pb2.WriteCommitted(manifest_json=manifest))
    with pytest.raises(codec.MalformedMessageError):
        codec.read_tell_rank(message)


@given(st.binary(max_size=200))
def test_garbage_is_a_report_or_a_named_error(data: bytes) -> None:
    try:
        codec.read_stored_report(data)
    except codec.MalformedMessageError:
        pass


def test_a_node_that_says_nothing_of_skips_is_an_older_one_and_none_at_all_is_a_number() -> None:
    hello = messages.NodeHello(job="j", node="n", version="0.1.0", policy="skip", command=(), run_dir="/r", max_skips=0)
    assert codec.read_node_message(through(codec.node_message(hello))).max_skips == 0
    older = telemetry_pb2.NodeMessage(hello=telemetry_pb2.NodeHello(job="j", policy="skip"))
    assert codec.read_node_message(older).max_skips is None
