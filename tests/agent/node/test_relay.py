"""The control socket: who may connect, what passes, and that garbage costs only the connection that sent it."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from torch_watchdog_agent.node.relay import Relay
from torch_watchdog_proto.codec import control_message
from torch_watchdog_proto.envelopes import ControlUp, RankLost, RankSaid, TellRank
from torch_watchdog_proto.frames import MAX_FRAME_BYTES, Decoder, encode
from torch_watchdog_proto.messages import (
    Abandon,
    Ack,
    BatchFact,
    BoundFact,
    Commit,
    Committed,
    Finished,
    Hold,
    Leave,
    Left,
    Noticed,
    Order,
    Prepare,
    RankHello,
    Saved,
    Violation,
)
from torch_watchdog_proto.rescue_words import Free, Rescue


def hello(rank: int, attempt: int = 0) -> RankHello:
    return RankHello(rank=rank, local_rank=rank, world_size=2, pid=100 + rank, attempt=attempt, host="h", version="0.1.0")


class Ranks:
    """A relay and what it passed up."""

    def __init__(self, folder: Path) -> None:
        self.up: list[ControlUp] = []
        self.path = folder / "control.sock"
        self.relay = Relay(folder, on_up=self.up.append)

    async def connect(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(data)
        return reader, writer

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def relay(folder: Path) -> AsyncIterator[Ranks]:
    folder.chmod(0o700)
    ranks = Ranks(folder)
    await ranks.relay.open()
    try:
        yield ranks
    finally:
        await ranks.relay.close()


def run(scenario: Callable[[Ranks], Awaitable[None]], folder: Path) -> None:
    async def main() -> None:
        async with relay(folder) as ranks:
            await scenario(ranks)

    asyncio.run(main())


def test_a_ranks_words_pass_up_in_order_and_its_end_is_told(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        ack = Ack(rank=1, generation=1, passed=4)
        _, writer = await ranks.connect(encode(hello(1)) + encode(ack))
        await ranks.until(lambda: len(ranks.up) == 2)
        writer.close()
        await ranks.until(lambda: len(ranks.up) == 3)
        assert ranks.up == [
            RankSaid(attempt=0, message=hello(1)),
            RankSaid(attempt=0, message=ack),
            RankLost(attempt=0, rank=1, pid=101),
        ]

    run(scenario, tmp_path)


def test_what_a_rank_has_found_is_said_again_to_the_next_daemon(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        bad = Violation(
            kind="batch.index_out_of_range", summary="s", cause="c", fix="f", batch=BatchFact(key="x", value=70),
            bound=BoundFact(low=0, high=63, op="embedding"),
        )  # fmt: skip
        found = Noticed(rank=1, step=3, micro_step=0, violation=bad)
        _, writer = await ranks.connect(encode(hello(1)) + encode(Ack(rank=1, generation=1, passed=4)) + encode(found))
        await ranks.until(lambda: len(ranks.up) == 3)
        assert ranks.relay.hellos() == (RankSaid(attempt=0, message=hello(1)), RankSaid(attempt=0, message=found))
        writer.close()

    run(scenario, tmp_path)


def test_what_a_rank_has_sealed_is_said_again_to_the_next_daemon(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        sealed = Committed(rank=0, generation=3)
        _, writer = await ranks.connect(encode(hello(0)) + encode(sealed))
        await ranks.until(lambda: len(ranks.up) == 2)
        assert ranks.relay.hellos() == (RankSaid(attempt=0, message=hello(0)), RankSaid(attempt=0, message=sealed))
        writer.close()

    run(scenario, tmp_path)


def test_a_hold_is_said_again_until_its_answer_has_passed(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        bad = Violation(kind="batch.index_out_of_range", summary="s", cause="c", fix="f", batch=BatchFact(key="x", value=70))
        held = Hold(rank=1, step=3, micro_step=0, violation=bad)
        _, writer = await ranks.connect(encode(hello(1)) + encode(held) + encode(Ack(rank=1, generation=1, passed=2)))
        await ranks.until(lambda: len(ranks.up) == 3)
        ranks.relay.tell(TellRank(attempt=0, rank=1, order=Prepare(generation=1, veto=3)))
        assert ranks.relay.hellos() == (RankSaid(attempt=0, message=hello(1)), RankSaid(attempt=0, message=held))
        ranks.relay.tell(TellRank(attempt=0, rank=1, order=Abandon(generation=1)))
        assert ranks.relay.hellos() == (RankSaid(attempt=0, message=hello(1)),)
        writer.close()

    run(scenario, tmp_path)


def test_an_order_of_an_attempt_that_was_replaced_reaches_nobody(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        reader, _ = await ranks.connect(encode(hello(1, attempt=1)))
        await ranks.until(lambda: len(ranks.relay.hellos()) == 1)
        ranks.relay.tell(TellRank(attempt=0, rank=1, order=Leave(generation=1)))
        ranks.relay.tell(TellRank(attempt=1, rank=1, order=Leave(generation=2)))
        assert Decoder().feed(await reader.read(4096)) == [Leave(generation=2)]

    run(scenario, tmp_path)


def test_an_order_reaches_its_rank_only(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        lines = [await ranks.connect(encode(hello(rank))) for rank in (0, 1)]
        await ranks.until(lambda: len(ranks.relay.hellos()) == 2)
        for rank, order in ((1, Prepare(generation=1, veto=5)), (0, Leave(generation=2)), (7, Leave(generation=3))):
            ranks.relay.tell(TellRank(attempt=0, rank=rank, order=order))
        assert [Decoder().feed(await reader.read(4096)) for reader, _ in lines] == [[Leave(generation=2)], [Prepare(generation=1, veto=5)]]

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x02{}",
        encode(Ack(rank=1, generation=1, passed=1)),
        encode(Leave(generation=1)),
        encode(hello(1)) + encode(Ack(rank=0, generation=1, passed=1)),
        encode(hello(1)) + encode(Leave(generation=1)),
        encode(hello(1)) + encode(Saved(rank=1, generation=1, updates_applied=1, path="x" * 70_000)),
        encode(hello(-1)),
        encode(hello(2)),
        encode(replace(hello(1), pid=10**400)),
        encode(replace(hello(0), world_size=1)),
    ],
    ids=range(13),
)
def test_garbage_closes_its_own_connection_and_no_other(tmp_path: Path, garbage: bytes) -> None:
    async def scenario(ranks: Ranks) -> None:
        good, writer = await ranks.connect(encode(hello(0)))
        await ranks.until(lambda: len(ranks.up) == 1)
        bad, _ = await ranks.connect(garbage)
        async with asyncio.timeout(10):
            assert await bad.read() == b""
        writer.write(encode(Finished(rank=0, passed=7)))
        await ranks.until(lambda: RankSaid(attempt=0, message=Finished(rank=0, passed=7)) in ranks.up)
        assert not good.at_eof()
        for said in ranks.up:
            control_message(said)  # what does not fit the wire would end the line to the daemon, for all ranks

    run(scenario, tmp_path)


@pytest.mark.parametrize("beginning", [b"", encode(hello(1))[:7]])
def test_a_rank_that_dies_before_its_hello_is_whole_is_no_fault_of_ours(tmp_path: Path, beginning: bytes) -> None:
    unhandled: list[object] = []

    async def scenario(ranks: Ranks) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        reader, writer = await ranks.connect(beginning)
        writer.write_eof()
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        assert ranks.up == []

    run(scenario, tmp_path)
    assert unhandled == []


def test_the_newest_connection_of_a_rank_counts_and_the_older_ones_end_is_not_told(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        _, old = await ranks.connect(encode(hello(0)))
        await ranks.until(lambda: len(ranks.up) == 1)
        new, _ = await ranks.connect(encode(hello(0)))
        await ranks.until(lambda: len(ranks.up) == 2)
        old.close()
        ranks.relay.tell(TellRank(attempt=0, rank=0, order=Leave(generation=1)))
        assert Decoder().feed(await new.read(4096)) == [Leave(generation=1)]
        assert not [said for said in ranks.up if isinstance(said, RankLost)]

    run(scenario, tmp_path)


def test_what_a_dead_rank_had_said_is_still_heard_when_the_relay_closes(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        with socket.socket(socket.AF_UNIX) as rank:
            rank.connect(str(ranks.path))
            rank.sendall(encode(hello(0)) + encode(Finished(rank=0, passed=7)))
        await ranks.relay.close()
        assert [type(said).__name__ for said in ranks.up] == ["RankSaid", "RankSaid", "RankLost"]

    run(scenario, tmp_path)


def test_a_rank_that_lives_when_the_relay_closes_is_not_called_lost(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        _, writer = await ranks.connect(encode(hello(0)))
        await ranks.until(lambda: len(ranks.up) == 1)
        await ranks.relay.close()
        assert [type(said).__name__ for said in ranks.up] == ["RankSaid"]
        writer.close()

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    ("orders", "answer", "at_work", "goes_on"),
    [
        ((), None, False, True),
        ((Prepare(generation=1),), None, True, True),
        ((Prepare(generation=1), Abandon(generation=1)), None, False, True),
        ((Commit(generation=1), Leave(generation=1)), None, True, True),
        ((Commit(generation=1), Leave(generation=1)), Left(rank=0, generation=1, updates_applied=1), False, False),
        ((Commit(generation=1, leave=False), Leave(generation=1)), None, False, True),
        ((Free(generation=1), Rescue(generation=1, path="p")), None, True, True),
        ((Free(generation=1), Leave(generation=1)), None, False, False),
    ],
    ids=[
        "trains",
        "promises",
        "was taken back",
        "has written",
        "has left",
        "trains on after its checkpoint",
        "rescues",
        "was freed, and ends",
    ],
)
def test_who_has_an_order_to_carry_out_and_who_goes_on(
    tmp_path: Path, orders: tuple[Order, ...], answer: Left | None, at_work: bool, goes_on: bool
) -> None:
    async def scenario(ranks: Ranks) -> None:
        _, writer = await ranks.connect(encode(hello(0)))
        await ranks.until(lambda: len(ranks.up) == 1)
        for order in orders:
            ranks.relay.tell(TellRank(attempt=0, rank=0, order=order))
        if answer is not None:
            writer.write(encode(answer))
            await ranks.until(lambda: len(ranks.up) == 2)
        assert (ranks.relay.at_work(), ranks.relay.to_go_on()) == ((100,) if at_work else (), (100,) if goes_on else ())
        writer.close()

    run(scenario, tmp_path)


def test_the_socket_is_for_this_user_only(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        assert stat.S_IMODE(os.stat(ranks.path).st_mode) == 0o600

    run(scenario, tmp_path)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="others"):
        asyncio.run(Relay(tmp_path, on_up=lambda said: None).open())


@pytest.mark.parametrize(("leave", "says", "stopped"), [(True, True, True), (True, False, False), (False, True, False)])
def test_a_node_has_stopped_once_all_its_ranks_have_left_on_an_order_to_all(tmp_path: Path, leave: bool, says: bool, stopped: bool) -> None:
    order = Commit(
        generation=1, veto=None, stop_after=3, save=True, leave=leave, exit_code=143, path="/c/step-4", reason="SIGTERM", grace_s=300.0
    )  # fmt: skip

    async def scenario(ranks: Ranks) -> None:
        writers = [(await ranks.connect(encode(hello(rank))))[1] for rank in (0, 1)]
        await ranks.until(lambda: len(ranks.up) == 2)
        assert ranks.relay.stopped_s is None
        for rank, writer in enumerate(writers):
            ranks.relay.tell(TellRank(attempt=0, rank=rank, order=order))
            if says or rank:
                writer.write(encode(Left(rank=rank, generation=1, updates_applied=4)))
            writer.close()
        await ranks.until(lambda: sum(isinstance(one, RankLost) for one in ranks.up) == 2)
        assert (ranks.relay.stopped_s is not None) == stopped
        _, writer = await ranks.connect(encode(hello(0, attempt=1)))
        await ranks.until(lambda: RankSaid(attempt=1, message=hello(0, attempt=1)) in ranks.up)
        assert ranks.relay.stopped_s is None
        writer.close()

    run(scenario, tmp_path)
