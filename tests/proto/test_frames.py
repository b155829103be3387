"""Frames between a rank and its node process: whole messages come out of any pieces, anything else is refused."""

from __future__ import annotations

import json
import struct
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_watchdog_proto import messages as m
from torch_watchdog_proto.frames import MAX_FRAME_BYTES, Decoder, FrameError, encode, from_json, to_json
from torch_watchdog_proto.rescue_words import Failed

TEXT = st.text(max_size=20)
NUMBER = st.one_of(st.none(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False, width=32))
VIOLATIONS = st.builds(
    m.Violation,
    kind=TEXT,
    summary=TEXT,
    cause=TEXT,
    fix=TEXT,
    batch=st.builds(
        m.BatchFact,
        key=TEXT,
        element=st.one_of(st.none(), st.lists(st.integers(0, 99), max_size=4).map(tuple)),
        value=NUMBER,
        shape=st.lists(st.integers(0, 99), max_size=4).map(tuple),
        derived=st.one_of(st.none(), st.builds(m.Derived, expression=TEXT, value=NUMBER)),
        sample=st.one_of(st.none(), st.builds(m.Sample, dataset_index=st.one_of(st.none(), st.integers(0, 9)))),
        also=st.lists(st.dictionaries(TEXT, st.integers()), max_size=2).map(tuple),
    ),
    bound=st.one_of(st.none(), st.builds(m.BoundFact, low=NUMBER, high=NUMBER, ignored=st.lists(st.integers(), max_size=2).map(tuple))),
)
INT = st.integers(0, 2**31)
FILES = st.builds(m.SavedFile, name=TEXT, size=INT, sha256=TEXT)
MESSAGES = st.one_of(
    st.builds(m.Hold, rank=INT, step=INT, micro_step=INT, violation=VIOLATIONS, timeout_s=st.floats(0, 100)),
    st.builds(m.Refused, rank=INT, step=INT, micro_step=INT, violation=VIOLATIONS),
    st.builds(m.Ack, rank=INT, generation=INT, passed=st.integers(-1, 9), phase=st.sampled_from(typing.get_args(m.Phase))),
    st.builds(m.CannotPromise, rank=INT, generation=INT, reason=TEXT),
    st.builds(m.Saved, rank=INT, generation=INT, updates_applied=INT, files=st.lists(FILES, max_size=2).map(tuple), error=st.none() | TEXT),
    st.builds(m.Commit, generation=INT, veto=st.none() | INT, stop_after=st.none() | INT, save=st.booleans(), reason=TEXT),
    st.builds(m.WriteCommitted, generation=INT, manifest=st.dictionaries(TEXT, TEXT, max_size=2)),
    st.builds(m.RankHello, rank=INT, local_rank=INT, world_size=INT, pid=INT, attempt=INT, host=TEXT, version=TEXT),
    st.builds(m.Leave, generation=INT, committed=st.booleans()),
)


@given(st.lists(MESSAGES, max_size=4), st.integers(1, 50))
def test_messages_come_whole_out_of_any_pieces(sent: list[m.RankMessage | m.Order], piece: int) -> None:
    stream = b"".join(map(encode, sent))
    decoder, got = Decoder(), []
    for start in range(0, len(stream), piece):
        got += decoder.feed(stream[start : start + piece])
    assert got == sent


def _frame(value: object) -> bytes:
    body = json.dumps(value).encode()
    return struct.pack("!I", len(body)) + body


@pytest.mark.parametrize(
    "value",
    [
        {"type": "Nobody"},
        [],
        "text",
        {"type": "Ack", "rank": "1", "generation": 1, "passed": 1},
        {"type": "Ack", "rank": True, "generation": 1, "passed": 1},
        {"type": "Ack", "rank": 1, "generation": 1},
        {"type": "Ack", "rank": 1, "generation": 1, "passed": 1, "phase": "sleeping"},
        {"type": "Leave", "generation": 1, "committed": "yes"},
        {"type": "Hold", "rank": 1, "step": 1, "micro_step": 0, "violation": None},
        {"type": "Prepare", "generation": 1, "timeout_s": 10**310},
    ],
)
def test_a_frame_that_is_no_message_is_refused(value: object) -> None:
    with pytest.raises(FrameError):
        Decoder().feed(_frame(value))


@given(st.binary(min_size=4, max_size=200))
def test_random_bytes_raise_nothing_but_frame_errors(garbage: bytes) -> None:
    try:
        Decoder().feed(garbage)
    except FrameError:
        pass


def test_a_frame_may_not_announce_more_than_the_limit() -> None:
    with pytest.raises(FrameError, match=str(MAX_FRAME_BYTES)):
        Decoder().feed(struct.pack("!I", MAX_FRAME_BYTES + 1))


def test_fields_of_a_newer_peer_are_ignored() -> None:
    assert from_json(m.Leave, {"generation": 3, "colour": "blue"}) == m.Leave(generation=3)


def test_values_that_json_cannot_say_travel_as_words() -> None:
    violation = m.Violation(kind="k", summary="s", cause="c", fix="f", batch=m.BatchFact(key="x", value=float("nan")))
    assert to_json(violation)["batch"]["value"] == "nan"
    assert Decoder().feed(encode(m.Refused(rank=0, step=0, micro_step=0, violation=violation)))


def test_a_text_that_is_no_utf_8_reaches_the_other_side() -> None:
    """A file name of other bytes, in an exception's words. No protobuf message can carry such a text: the rank's line was closed for it."""
    failed = Failed(
        rank=0, step=1, between=False, time_ns=0, updates_applied=0, text="FileNotFoundError: 'caf\udce9.jpg'", where="caf\u00e9.py:1"
    )
    (arrived,) = Decoder().feed(encode(failed))
    assert isinstance(arrived, Failed)
    assert (arrived.text, arrived.where) == ("FileNotFoundError: 'caf?.jpg'", "caf\u00e9.py:1")
