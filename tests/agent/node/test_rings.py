"""The rings folder: what ranks record becomes blocks, whatever else lies there and whenever a rank dies."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_watchdog_agent.node.blocks import BlockBuilder
from torch_watchdog_agent.node.rings import RingFolder, RingNews
from torch_watchdog_proto import codec
from torch_watchdog_proto.messages import StepBlock
from torch_watchdog_proto.record import (
    DEVICE_WORD,
    DEVICE_WORDS_AT,
    UPDATES_DONE,
    VERSION,
    KeyNamed,
    MicroStep,
    Note,
    Record,
    RingHeader,
    RingWriter,
    StepDone,
    TensorSeen,
    ring_bytes,
)

DEAD, ALIVE = 999_999_999, os.getpid()


def tensor(step: int, micro_step: int = 0, key_id: int = 0) -> TensorSeen:
    return TensorSeen(
        key_id=key_id,
        dtype="int64",
        step=step,
        micro_step=micro_step,
        low=0.0,
        high=63.0,
        negatives=0,
        ignored=0,
        finite=True,
        shape=(4, 8),
    )


def micro(step: int, micro_step: int = 0, loss: float = 1.0) -> MicroStep:
    return MicroStep(step=step, micro_step=micro_step, time_ns=10 + step, loader_ns=5, loss=loss, loss_known=True)


def done(step: int) -> StepDone:
    return StepDone(
        step=step,
        time_ns=20 + step,
        step_ns=7,
        micro_steps=1,
        allocated_bytes=0,
        reserved_bytes=0,
        peak_bytes=0,
        vetoed=False,
        updates_applied=step + 1,
    )


def header(rank: int = 0, pid: int = ALIVE, capacity: int = 64) -> RingHeader:
    return RingHeader(rank=rank, attempt=0, pid=pid, world_size=2, start_time_ns=1, capacity=capacity)


class Rank:
    """Writes a ring as a rank does: a mapped file."""

    def __init__(self, folder: Path, *, rank: int = 0, pid: int = ALIVE, capacity: int = 64) -> None:
        self.path = folder / f"0-{rank}-{pid}.ring"
        with self.path.open("wb+") as file:
            file.truncate(ring_bytes(capacity))
            self.map = mmap.mmap(file.fileno(), ring_bytes(capacity))
        self.ring = RingWriter(memoryview(self.map), header(rank, pid, capacity))

    def write(self, *records: Record) -> None:
        for record in records:
            self.ring.write(record)


said: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    said.clear()


def folder_of(path: Path) -> RingFolder:
    return RingFolder(path, is_alive=lambda pid: pid == ALIVE, say=said.append)


def blocks(news: Iterable[RingNews]) -> list[StepBlock]:
    return [block for one in news for block in one.blocks]


def all_steps(found: Iterable[StepBlock]) -> list[int]:
    return [step for block in found for step in block.step]


def until_empty(rings: RingFolder) -> Iterator[RingNews]:
    for _ in range(100):
        news = rings.poll()
        yield from news
        if not any(one.more for one in news):
            return
    raise AssertionError("the ring never ended")


def test_a_ranks_records_become_columns(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.write(KeyNamed(key_id=0, name="input_ids"), tensor(0), micro(0, loss=2.5), done(0), tensor(1), micro(1, loss=2.0), done(1))
    (block,) = blocks(folder_of(tmp_path).poll())
    assert (block.rank, block.pid, block.first_record) == (0, ALIVE, 1)
    assert (block.micro_of_step, block.loss, block.step, block.updates_applied) == ((0, 1), (2.5, 2.0), (0, 1), (1, 2))
    (columns,) = block.tensors
    assert (columns.key, columns.rows, columns.high, columns.shapes) == ("input_ids", (0, 1), (63.0, 63.0), ((4, 8), (4, 8)))


def test_how_far_a_device_was_is_known_of_a_rank_that_is_gone(tmp_path: Path) -> None:
    """Its GPU had written it, into the ring."""
    dead, alive, bare, rings = Rank(tmp_path, pid=DEAD), Rank(tmp_path), Rank(tmp_path, rank=1, pid=os.getppid()), folder_of(tmp_path)
    for rank, count in ((dead, 30), (alive, 31)):
        DEVICE_WORD.pack_into(rank.map, DEVICE_WORDS_AT + UPDATES_DONE * DEVICE_WORD.size, count)
        rank.write(micro(0), done(0))
    bare.write(micro(0), done(0))
    assert [rings.updates_on_device(pid) for pid in (DEAD, ALIVE)] == [None, None]  # no ring was found yet
    assert all_steps(blocks(until_empty(rings))) == [0, 0, 0]
    assert not dead.path.exists()
    assert [rings.updates_on_device(pid) for pid in (DEAD, ALIVE, os.getppid())] == [30, 31, None]
    alive.path.open("wb").truncate(80)
    assert rings.updates_on_device(ALIVE) is None


def test_a_process_with_the_number_of_one_that_is_gone_has_not_its_device(tmp_path: Path) -> None:
    living = set[int]()
    first, rings = Rank(tmp_path, pid=DEAD), RingFolder(tmp_path, is_alive=living.__contains__, say=said.append)
    DEVICE_WORD.pack_into(first.map, DEVICE_WORDS_AT + UPDATES_DONE * DEVICE_WORD.size, 30)
    rings.poll()
    living.add(DEAD)
    Rank(tmp_path, rank=1, pid=DEAD).write(micro(0), done(0))
    rings.poll()
    assert rings.updates_on_device(DEAD) is None


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    rank, rings = Rank(tmp_path), folder_of(tmp_path)
    rank.write(micro(0), done(0))
    assert all_steps(blocks(rings.poll())) == [0]
    assert rings.poll() == ()
    rank.write(micro(1), done(1))
    assert all_steps(blocks(rings.poll())) == [1]


def test_tensors_wait_for_the_loss_of_their_batch(tmp_path: Path) -> None:
    rank, rings = Rank(tmp_path), folder_of(tmp_path)
    rank.write(KeyNamed(key_id=0, name="x"), tensor(0))
    assert blocks(rings.poll()) == []
    rank.write(micro(0))
    (block,) = blocks(rings.poll())
    assert (block.micro_of_step, block.tensors[0].key, block.tensors[0].rows) == ((0,), "x", (0,))


def test_the_last_batch_of_a_killed_rank_is_there_and_its_ring_is_gone(tmp_path: Path) -> None:
    rank = Rank(tmp_path, pid=DEAD)
    rank.write(KeyNamed(key_id=0, name="x"), micro(0), done(0), tensor(1))
    found = blocks(folder_of(tmp_path).poll())
    assert [block.micro_of_step for block in found] == [(0,), (1,)]
    assert (found[1].loss_known, found[1].tensors[0].key) == ((False,), "x")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_executes_itself_anew_is_read_in_both_lives(tmp_path: Path) -> None:
    rank, rings = Rank(tmp_path), folder_of(tmp_path)
    rank.write(micro(0), done(0))
    assert all_steps(blocks(rings.poll())) == [0]
    rank.write(micro(1), done(1))
    rank.path.unlink()
    Rank(tmp_path).write(micro(7), done(7))
    found = [*blocks(rings.poll()), *blocks(rings.poll())]
    assert all_steps(found) == [1, 7]


def test_a_ring_that_overflowed_says_how_much_is_lost(tmp_path: Path) -> None:
    rank, rings = Rank(tmp_path, capacity=16), folder_of(tmp_path)
    rank.write(done(0))
    rings.poll()
    rank.write(*(done(step) for step in range(1, 41)))
    (block,) = blocks(rings.poll())
    assert (block.lost_records, block.step) == (24, tuple(range(25, 41)))


def test_a_long_backlog_is_read_in_bounded_pieces(tmp_path: Path) -> None:
    rank = Rank(tmp_path, pid=DEAD, capacity=10_000)
    rank.write(*(done(step) for step in range(9_000)))
    pieces = blocks(until_empty(folder_of(tmp_path)))
    assert len(pieces) == 3 and all_steps(pieces) == list(range(9_000))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 24))
def test_every_record_is_read_once_or_counted_as_lost(bursts: list[int], capacity: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        rank, rings = Rank(Path(name), capacity=capacity), folder_of(Path(name))
        step, found = 0, list[StepBlock]()
        for burst in bursts:
            rank.write(*(done(number) for number in range(step, step + burst)))
            step += burst
            found += blocks(rings.poll())
        read = all_steps(found)
        assert read == sorted(set(read)) and len(read) + sum(block.lost_records for block in found) == step


def test_a_torn_record_is_counted_and_its_neighbours_are_read(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.write(done(0), done(1), done(2))
    rank.map[128 + 256 + 40] ^= 0xFF
    (block,) = blocks(folder_of(tmp_path).poll())
    assert (block.step, block.lost_records) == ((0, 2), 1)


@pytest.mark.parametrize("garbage", [b"", b"x", bytes(4096), bytes(range(256)) * 64, b"TWRING\r\n" + b"\xff" * 4096])
def test_garbage_beside_a_ring_changes_nothing(tmp_path: Path, garbage: bytes) -> None:
    for name in ("0-7-7.ring", "note.txt", "a-b-c.ring", f"0-9-{ALIVE}.ring"):
        (tmp_path / name).write_bytes(garbage)
    (tmp_path / "0-8-8.ring").mkdir()
    (tmp_path / "0-5-5.ring").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "0-6-6.ring")
    Rank(tmp_path).write(done(0))
    assert all_steps(blocks(folder_of(tmp_path).poll())) == [0]


def test_rings_of_another_version_are_told_once_with_what_to_do(tmp_path: Path) -> None:
    """They had looked like a launch without ranks."""
    for rank in (0, 1):
        ring = Rank(tmp_path, rank=rank)
        with ring.path.open("r+b") as file:
            file.seek(8)  # behind the magic
            file.write((VERSION + 1).to_bytes(2, "little"))
    rings = folder_of(tmp_path)
    assert rings.poll() == rings.poll() == ()
    (line,) = said
    assert (
        f"a ring of version {VERSION + 1}" in line
        and f"known here: version {VERSION}" in line
        and "install the same version in both" in line
    )


def test_a_ring_that_is_cut_short_under_the_reader_costs_only_itself(tmp_path: Path) -> None:
    cut, whole, rings = Rank(tmp_path, rank=0), Rank(tmp_path, rank=1), folder_of(tmp_path)
    rings.poll()
    os.truncate(cut.path, 100)
    whole.write(done(0))
    assert all_steps(blocks(rings.poll())) == [0]


def test_a_ring_whose_name_is_gone_is_still_read(tmp_path: Path) -> None:
    rank, rings = Rank(tmp_path), folder_of(tmp_path)
    rings.poll()
    rank.path.unlink()
    rank.write(done(0))
    assert all_steps(blocks(rings.poll())) == [0]


def test_a_file_becomes_a_ring_once_its_header_is_there(tmp_path: Path) -> None:
    path = tmp_path / f"0-0-{ALIVE}.ring"
    path.write_bytes(bytes(ring_bytes(64)))
    rings = folder_of(tmp_path)
    assert rings.poll() == ()
    Rank(tmp_path).write(done(0))
    (news,) = rings.poll()
    assert news.new and all_steps(news.blocks) == [0]


def test_notes_come_beside_the_blocks(tmp_path: Path) -> None:
    Rank(tmp_path).write(Note(level=2, time_ns=1, text="ValueError: no"))
    (news,) = folder_of(tmp_path).poll()
    assert [note.text for note in news.notes] == ["ValueError: no"] and news.blocks == ()


def test_a_folder_that_is_gone_is_empty(tmp_path: Path) -> None:
    assert folder_of(tmp_path / "gone").poll() == ()


def test_a_batch_whose_micro_step_was_lost_goes_out_with_the_next() -> None:
    builder = BlockBuilder(header())
    builder.build([tensor(0)], first_record=1, lost=0)
    block, _ = builder.build([tensor(1), micro(1)], first_record=2, lost=1)
    assert block is not None
    assert (block.micro_of_step, block.loss_known, block.tensors[0].rows) == ((0, 1), (False, True), (0, 1))


RECORDS = st.one_of(
    st.builds(tensor, st.integers(0, 5), st.integers(0, 2), st.integers(0, 3)),
    st.builds(micro, st.integers(0, 5), st.integers(0, 2), st.just(math.nan)),
    st.builds(done, st.integers(0, 5)),
    st.builds(KeyNamed, key_id=st.integers(0, 3), name=st.sampled_from("abc")),
)


@given(st.lists(st.lists(RECORDS, max_size=12), max_size=5))
def test_any_order_of_records_gives_blocks_that_pass_the_wire_and_no_tensor_twice(reads: list[list[Record]]) -> None:
    builder, found = BlockBuilder(header()), list[StepBlock | None]()
    for records in reads:
        found.append(builder.build(records, first_record=1, lost=0)[0])
    found.append(builder.rest(first_record=1))
    whole = [block for block in found if block is not None]
    for block in whole:
        codec.plain_message(block)
    num_tensors = sum(isinstance(record, TensorSeen) for records in reads for record in records)
    assert sum(len(columns.rows) for block in whole for columns in block.tensors) == num_tensors
