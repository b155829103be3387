"""The ring: what a reader may rely on while the writer writes, or has died writing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_watchdog_proto.record import (
    HEADER_BYTES,
    RECORD_BYTES,
    DeviceNamed,
    GradientsSharded,
    KeyNamed,
    MicroStep,
    Note,
    Record,
    RingFormatError,
    RingHeader,
    RingReader,
    RingWriter,
    StepDone,
    TensorSeen,
    TokenizerSeen,
    ring_bytes,
)

COUNT = st.integers(0, 2**32 - 1)
BIG = st.integers(0, 2**64 - 1)
REAL = st.floats(allow_nan=False)
RECORDS: st.SearchStrategy[Record] = st.one_of(
    st.builds(KeyNamed, key_id=st.integers(0, 65535), name=st.text("abcdefgh._0é", max_size=100), low=REAL, high=REAL),
    st.builds(TokenizerSeen, tokens=st.integers(0, 1 << 40)),
    st.builds(GradientsSharded),
    st.builds(DeviceNamed, uuid=st.text("GPU-0123abc", max_size=60)),
    st.builds(
        TensorSeen,
        key_id=st.integers(0, 65535),
        dtype=st.sampled_from(["int64", "float32", "bool", "bfloat16"]),
        step=BIG,
        micro_step=COUNT,
        low=REAL,
        high=REAL,
        negatives=BIG,
        ignored=BIG,
        finite=st.booleans(),
        shape=st.lists(st.integers(0, 2**40), max_size=8).map(tuple),
    ),
    st.builds(
        MicroStep,
        step=BIG,
        micro_step=COUNT,
        time_ns=BIG,
        loader_ns=BIG,
        loss=REAL,
        loss_known=st.booleans(),
        evaluation=st.booleans(),
        forward_ns=BIG,
        scale=REAL,
        reach=REAL,
    ),
    st.builds(
        StepDone,
        step=BIG,
        time_ns=BIG,
        step_ns=BIG,
        micro_steps=COUNT,
        allocated_bytes=BIG,
        reserved_bytes=BIG,
        peak_bytes=BIG,
        vetoed=st.booleans(),
        updates_applied=st.integers(0, 2**63 - 1),
        backward_ns=BIG,
        grad_norm=REAL,
        alloc_retries=COUNT,
        update_ns=BIG,
    ),
    st.builds(Note, level=st.integers(0, 2), time_ns=BIG, text=st.text(max_size=60)),
)


def new_ring(capacity: int) -> tuple[bytearray, RingWriter]:
    memory = bytearray(ring_bytes(capacity))
    header = RingHeader(rank=3, attempt=1, pid=77, world_size=8, start_time_ns=5, capacity=capacity)
    return memory, RingWriter(memoryview(memory), header)


def a_note(number: int) -> Note:
    return Note(level=0, time_ns=number, text=f"note {number}")


@given(st.lists(RECORDS, max_size=20))
def test_every_record_is_read_back_as_it_was_written(records: list[Record]) -> None:
    memory, writer = new_ring(32)
    for record in records:
        writer.write(record)
    read, lost = RingReader(memoryview(memory)).read()
    assert list(read) == records
    assert lost == 0


def test_a_reader_that_is_too_slow_gets_the_newest_records_and_the_number_of_lost_ones() -> None:
    memory, writer = new_ring(4)
    reader = RingReader(memoryview(memory))
    for number in range(10):
        writer.write(a_note(number))
    read, lost = reader.read()
    assert [note.time_ns for note in read if isinstance(note, Note)] == [6, 7, 8, 9]
    assert lost == 6


def test_reading_goes_on_where_it_stopped() -> None:
    memory, writer = new_ring(8)
    reader = RingReader(memoryview(memory))
    writer.write(a_note(0))
    assert reader.read() == ((a_note(0),), 0)
    assert reader.read() == ((), 0)
    writer.write(a_note(1))
    assert reader.read() == ((a_note(1),), 0)


def test_a_limit_leaves_the_rest_for_the_next_read() -> None:
    memory, writer = new_ring(8)
    reader = RingReader(memoryview(memory))
    for number in range(5):
        writer.write(a_note(number))
    assert len(reader.read(limit=3)[0]) == 3
    assert len(reader.read(limit=3)[0]) == 2


@pytest.mark.parametrize("offset", [0, 8, 12, 14, 16, 40])
def test_a_torn_record_is_counted_and_never_believed(offset: int) -> None:
    memory, writer = new_ring(8)
    for number in range(3):
        writer.write(a_note(number))
    memory[HEADER_BYTES + RECORD_BYTES + offset % RECORD_BYTES] ^= 0xFF
    read, lost = RingReader(memoryview(memory)).read()
    torn_payload_past_the_text = offset >= 16 + 9 + len("note 1")
    assert lost == (0 if torn_payload_past_the_text else 1)
    assert all(isinstance(note, Note) and note.text == f"note {note.time_ns}" for note in read)


@given(st.binary(max_size=2 * RECORD_BYTES))
def test_garbage_is_no_ring(garbage: bytes) -> None:
    with pytest.raises(RingFormatError):
        RingReader(memoryview(garbage))


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES), st.integers(0, 7))
def test_garbage_in_a_slot_never_raises(garbage: bytes, slot: int) -> None:
    memory, writer = new_ring(8)
    for number in range(8):
        writer.write(a_note(number))
    memory[HEADER_BYTES + slot * RECORD_BYTES : HEADER_BYTES + (slot + 1) * RECORD_BYTES] = garbage
    read, lost = RingReader(memoryview(memory)).read()
    assert len(read) + lost == 8


def test_a_ring_of_another_version_is_refused_with_both_versions() -> None:
    memory, _ = new_ring(4)
    memory[8] = 9
    with pytest.raises(RingFormatError, match=r"version 9.*version 4"):
        RingReader(memoryview(memory))


def test_long_text_is_cut_at_a_character() -> None:
    memory, writer = new_ring(4)
    writer.write(Note(level=0, time_ns=1, text="é" * 500))
    note = RingReader(memoryview(memory)).read()[0][0]
    assert isinstance(note, Note)
    assert set(note.text) == {"é"}


def test_a_loss_that_is_nan_stays_nan() -> None:
    memory, writer = new_ring(4)
    writer.write(MicroStep(step=1, micro_step=0, time_ns=1, loader_ns=1, loss=math.nan, loss_known=True))
    micro = RingReader(memoryview(memory)).read()[0][0]
    assert isinstance(micro, MicroStep)
    assert math.isnan(micro.loss)
    assert micro.loss_known
