"""The socket that pages are served on."""

from __future__ import annotations

import asyncio
import socket

from torch_watchdog.web import server


def test_asyncio_sends_each_answer_at_once() -> None:
    """It turns Nagle's algorithm off only on sockets that name their protocol; else every answer of a connection but the first waits 40 ms."""

    async def option_of_an_accepted_socket() -> int:
        options: list[int] = []
        accepted = asyncio.Event()

        def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            options.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            accepted.set()

        listener = server._listen("127.0.0.1:0", is_safe=False)
        async with await asyncio.start_server(note, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            await accepted.wait()
            writer.close()
        return options[0]

    assert asyncio.run(option_of_an_accepted_socket()) == 1
