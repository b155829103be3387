"""Orders for a node lie in its outbox until a stream takes them. A broken stream may look whole for a while: it must not swallow what the next is to carry."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from torch_watchdog.daemon.calls import Calls
from torch_watchdog.daemon.counters import Counters
from torch_watchdog.daemon.live_job import Outbox
from torch_watchdog.daemon.services import ControlService
from torch_watchdog_proto import codec
from torch_watchdog_proto.codec import MAX_TEXT
from torch_watchdog_proto.envelopes import TellRank
from torch_watchdog_proto.messages import Leave
from torch_watchdog_proto.rescue_words import Free

ORDERS = tuple(TellRank(attempt=0, rank=rank, order=Leave(generation=1)) for rank in range(4))


async def written(outbox: Outbox, stream: list[TellRank]) -> None:
    """As the daemon writes them to a stream that takes all at once."""
    while True:
        order = await outbox.first()
        stream.append(order)
        outbox.done(order)


def test_a_stream_that_only_looks_whole_swallows_no_order() -> None:
    async def two_streams() -> None:
        outbox, broken = Outbox(), list[TellRank]()
        old = asyncio.create_task(written(first := outbox.taken_over(), broken))
        first.put(ORDERS[0])
        await asyncio.sleep(0)
        new = first.taken_over()
        for order in ORDERS[1:]:
            new.put(order)
        for _ in range(10):  # the old one has every chance before the new one begins
            await asyncio.sleep(0)
        old.cancel()
        assert broken == list(ORDERS[:1])
        stream = list[TellRank]()
        writing = asyncio.create_task(written(new, stream))
        for _ in range(10):
            await asyncio.sleep(0)
        writing.cancel()
        assert stream == list(ORDERS[1:])

    asyncio.run(two_streams())


def test_what_an_old_stream_was_writing_is_written_again() -> None:
    async def taken_over_in_the_middle() -> None:
        old = Outbox()
        old.put(ORDERS[0])
        half_written = await old.first()
        new = old.taken_over()
        old.done(half_written)
        assert await new.first() is half_written

    asyncio.run(taken_over_in_the_middle())


def test_an_order_that_does_not_fit_a_message_is_told_of_and_keeps_back_no_other() -> None:
    """Of what a rank of another make has said: the text of its failure, as long as a message takes, and a few words before it."""
    said: list[str] = []
    written = list[Any]()

    class Stream:
        def peer(self) -> str:
            return "unix:"

        async def write(self, message: Any) -> None:
            written.append(codec.read_tell_rank(message))

    async def orders() -> None:
        outbox = Outbox()
        calls = Calls(grants=cast("Any", None), counters=Counters(started_s=0.0), audit=cast("Any", None), say=said.append)
        for order in (TellRank(attempt=0, rank=1, order=Free(generation=1, reason="x" * (MAX_TEXT + 1))), *ORDERS):
            outbox.put(order)
        writing = asyncio.create_task(ControlService(cast("Any", None), calls)._write_orders(outbox, Stream()))
        for _ in range(10):
            await asyncio.sleep(0)
        writing.cancel()

    asyncio.run(orders())
    assert written == list(ORDERS) and len(said) == 1 and "an order for rank 1 does not fit" in said[0]


def test_an_order_that_is_on_its_way_as_its_stream_ends_is_written_whole() -> None:
    """gRPC never tells the node that a stream has ended of which a write was cancelled: a lone rank that was killed had nothing told of it."""
    has_begun, may_end, written = asyncio.Event(), asyncio.Event(), list[Any]()

    class Stream:
        async def write(self, message: Any) -> None:
            has_begun.set()
            await may_end.wait()
            written.append(codec.read_tell_rank(message))

    async def ends_meanwhile() -> None:
        outbox = Outbox()
        outbox.put(ORDERS[0])
        writing = asyncio.create_task(ControlService(cast("Any", None), cast("Any", None))._write_orders(outbox, Stream()))
        await has_begun.wait()
        writing.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not writing.done()
        may_end.set()
        await asyncio.wait((writing,))
        assert writing.cancelled()

    asyncio.run(ends_meanwhile())
    assert written == [ORDERS[0]]
