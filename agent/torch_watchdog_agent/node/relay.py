"""The unix socket where this node's ranks speak and hear: their messages go up to the daemon, orders come down.

Owns `control.sock` and one connection per rank. Whoever connects must be this user (SO_PEERCRED) and begin with a RankHello; bytes that are no frame
close that one connection and nothing else. Knows nothing of what messages mean, except who says them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch_watchdog_proto.codec import MalformedMessageError, control_message
from torch_watchdog_proto.envelopes import ControlUp, RankLost, RankSaid, TellRank
from torch_watchdog_proto.fault_points import reach
from torch_watchdog_proto.frames import Decoder, FrameError, encode
from torch_watchdog_proto.messages import (
    Abandon,
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
    RankMessage,
    Refused,
    Vetoed,
)
from torch_watchdog_proto.rescue_words import Failed, Free, Rescue

__all__ = ["Relay"]

_HELLO_TIMEOUT_S = 10.0
_ACCEPT_S = 0.02  # for a rank that has only just connected
_LAST_WORDS_S = 0.5  # of ranks that have ended: what they said is still in their sockets
_MAX_CONNECTIONS = 2048
_MAX_FOUND = 16  # of a rank: one that finds more has told all there is to tell
_MAX_UNSENT_BYTES = 4 << 20  # a rank that does not read has more trouble than we can help with
_PEER = struct.Struct("3i")


class Relay:
    """`on_up` gets what ranks say and that they are gone, in order, on the loop's thread."""

    def __init__(self, folder: Path, *, on_up: Callable[[ControlUp], None]) -> None:
        self._path = folder / "control.sock"
        self._on_up = on_up
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._ranks: dict[tuple[int, int], _Rank] = {}  # (attempt, rank)
        self._strayed = False  # one ended otherwise than by an order to all
        self._stopped_at: float | None = None

    async def open(self) -> None:
        """Listens from here on. Raises OSError."""
        _make_private(self._path.parent)
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._path, backlog=_MAX_CONNECTIONS)
        self._path.chmod(0o600)

    async def close(self) -> None:
        """No more connections; those that are open end. A rank that has ended is told up as lost; of one that lives nobody speaks any more."""
        if self._server is not None:
            await asyncio.sleep(_ACCEPT_S)
            self._server.close()
        if self._connections:
            await asyncio.wait(tuple(self._connections), timeout=_LAST_WORDS_S)
        for task in tuple(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(tuple(self._connections), timeout=1.0)
        with suppress(OSError):
            self._path.unlink()

    def hellos(self) -> tuple[RankSaid, ...]:
        """The last hello of every rank that is connected, for a daemon that has not heard them, what the rank has found or sealed, and what it holds.

        What was on its way when a daemon died is said again so; a daemon that knows it changes nothing.
        """
        said = ((attempt, message) for (attempt, _), rank in self._ranks.items() for message in (rank.hello, *rank.found, *rank.held))
        return tuple(RankSaid(attempt=attempt, message=message) for attempt, message in said)

    def pids(self) -> tuple[int, ...]:
        """Of every rank that is connected."""
        return tuple(rank.hello.pid for rank in tuple(self._ranks.values()))

    def to_go_on(self) -> tuple[int, ...]:
        """The pids of those that are here, and do not end by themselves."""
        return tuple(rank.hello.pid for rank in tuple(self._ranks.values()) if rank.is_at_work or not rank.ends)

    def at_work(self) -> tuple[int, ...]:
        """The pids of those that are here and have an order to carry out: a stop or checkpoint that is being agreed on or written, a rescue.

        Or they hold a batch until there is one.
        """
        return tuple(rank.hello.pid for rank in tuple(self._ranks.values()) if rank.is_at_work or rank.held)

    @property
    def stopped_s(self) -> float | None:
        """For how long no rank has been here any more, where each that was has left on an order to all of the job. None in any other case."""
        return None if self._stopped_at is None else time.monotonic() - self._stopped_at

    def tell(self, order: TellRank) -> None:
        """Passes an order on; one for a rank that is not here is dropped, as if it had come too late."""
        rank = self._ranks.get((order.attempt, order.rank))
        if rank is not None:
            reach("node", "before", order.order)
            if not isinstance(order.order, Prepare):
                rank.held = ()
            if isinstance(order.order, Commit):
                rank.leaves = order.order.leave
            rank.note_work(order.order)
            rank.send(order)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= _MAX_CONNECTIONS or not _is_own_user(writer):
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, FrameError, MalformedMessageError, TimeoutError, asyncio.CancelledError):
            pass  # the rank is gone, or it is none of ours
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder()
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            said = await _messages(reader, decoder)
        first = said[0] if said else None
        if not isinstance(first, RankHello):
            raise FrameError("the first message of a rank is its hello")
        if not 0 <= first.rank < first.world_size:
            raise FrameError(f"there is no rank {first.rank} of {first.world_size}")
        if any(attempt == first.attempt and one.hello.world_size != first.world_size for (attempt, _), one in self._ranks.items()):
            raise FrameError(f"rank {first.rank} of {first.world_size} is of another world than those that are here")
        control_message(RankSaid(attempt=first.attempt, message=first))  # before it counts as here: its end is told up, too
        rank = _Rank(first, writer)
        key = (first.attempt, first.rank)
        self._ranks[key], self._stopped_at = rank, None
        try:
            self._pass_up(rank, said)
            while messages := await _messages(reader, decoder):
                self._pass_up(rank, messages)
        except asyncio.CancelledError:
            self._ranks.pop(key, None)
            raise
        finally:
            if self._ranks.get(key) is rank:
                del self._ranks[key]
                self._strayed |= not (rank.leaves and rank.has_left)
                self._stopped_at = None if self._ranks or self._strayed else time.monotonic()
                self._on_up(RankLost(attempt=first.attempt, rank=first.rank, pid=first.pid))

    def _pass_up(self, rank: _Rank, messages: list[RankMessage]) -> None:
        for message in messages:
            if message.rank != rank.hello.rank:
                raise FrameError(f"rank {rank.hello.rank} speaks as rank {message.rank}")
            said = RankSaid(attempt=rank.hello.attempt, message=message)
            control_message(said)  # what would not pass the wire ends here, at the one connection that said it
            reach("node", "got", message)
            if isinstance(message, Noticed | Refused | Committed):
                rank.found.append(message)
            rank.has_left |= isinstance(message, Left)
            if isinstance(message, Left | Vetoed | Finished):
                rank.is_at_work = False
            rank.ends |= isinstance(message, Left | Failed)
            if isinstance(message, Hold):
                rank.held = (message,)
            elif isinstance(message, Refused | Vetoed | Left | Finished | Failed):
                rank.held = ()  # it waits no longer
            self._on_up(said)


class _Rank:
    """One connected rank."""

    def __init__(self, hello: RankHello, writer: asyncio.StreamWriter) -> None:
        self.hello = hello
        self.found: deque[Noticed | Refused | Committed] = deque(maxlen=_MAX_FOUND)
        self.leaves = self.has_left = False  # on an order to all: so it is decided, so it has done
        self.is_at_work = self.ends = False  # for an order of any kind; it will end by itself
        self.held: tuple[RankMessage, ...] = ()  # the hold that its training waits for an answer to
        self._writer = writer

    def note_work(self, order: Order) -> None:
        """What an order asks for, until it is done or taken back."""
        self.ends |= isinstance(order, Free)
        if isinstance(order, Prepare | Commit | Free | Rescue):
            self.is_at_work = True
        elif isinstance(order, Abandon) or (isinstance(order, Leave) and not self.leaves):  # a stop's is done once it has left
            self.is_at_work = False

    def send(self, order: TellRank) -> None:
        transport = self._writer.transport
        if transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            transport.abort()
        else:
            with suppress(FrameError):
                self._writer.write(encode(order.order))


async def _messages(reader: asyncio.StreamReader, decoder: Decoder) -> list[RankMessage]:
    """The next messages, at least one; none at the end of the stream."""
    while data := await reader.read(1 << 16):
        messages = decoder.feed(data)
        if any(not hasattr(message, "rank") for message in messages):
            raise FrameError("a rank sends no orders")
        if messages:
            return messages  # type: ignore[return-value]  # each has a rank, so none is an order
    return []


def _is_own_user(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(peer)
    return bool(uid == os.getuid())


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} can be entered by others: a socket there would let them stop this job")
