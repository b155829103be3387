"""The rank's line to its node process: a unix socket and one thread that answers orders while the training thread computes or waits.

Owns the socket and the thread; what orders mean is the gate's business. When the node process goes, the rank is told once and trains on without us.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch_watchdog_agent import keeper
from torch_watchdog_agent.config import AgentConfig
from torch_watchdog_agent.identity import Identity
from torch_watchdog_proto.fault_points import reach
from torch_watchdog_proto.frames import Decoder, FrameError, encode
from torch_watchdog_proto.messages import Order, RankHello, RankMessage

__all__ = ["ControlLine", "connected"]

_CONNECT_TIMEOUT_S = 2.0
_SEND_TIMEOUT_S = 2.0


class ControlLine:
    """`name`: of the rank, for its fault points. `on_order` runs on the control thread; `on_lost` too, once, when the line is gone."""

    def __init__(self, path: Path, *, name: str, on_order: Callable[[Order], tuple[RankMessage, ...]], on_lost: Callable[[], None]) -> None:
        self._name, self._on_order, self._on_lost = name, on_order, on_lost
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_CONNECT_TIMEOUT_S)
        self._socket.connect(str(path))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_TIMEOUT_S))
        self._sending = threading.Lock()
        self.connected = True

    def start(self) -> None:
        threading.Thread(target=self._listen, name="torch-watchdog-control", daemon=True).start()

    def send(self, message: RankMessage) -> bool:
        """False where the line is gone. Never blocks for longer than two seconds."""
        if not self.connected:
            return False
        reach(self._name, "before", message)
        try:
            with self._sending:
                self._socket.sendall(encode(message))
        except (OSError, FrameError):
            return False
        return True

    def forget(self) -> None:
        """In a forked child: the line belongs to the parent."""
        self.connected = False
        self._on_lost = lambda: None
        self._socket.close()

    def hang_up(self) -> None:
        """In the rank itself, which is none any more: the node process hears so. Closing alone does not wake a thread that waits there."""
        self.connected, self._on_lost = False, lambda: None
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        decoder = Decoder()
        try:
            while data := self._socket.recv(65536):
                for order in decoder.feed(data):
                    reach(self._name, "got", order)
                    for answer in self._on_order(order):  # type: ignore[arg-type]  # a rank's own words do not come back
                        self.send(answer)
        except (OSError, FrameError):
            pass
        self.connected = False
        self._on_lost()


def _timeval(seconds: float) -> bytes:
    import struct

    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))


def connected(
    config: AgentConfig,
    who: Identity,
    *,
    on_order: Callable[[Order], tuple[RankMessage, ...]],
    on_lost: Callable[[], None],
    say: Callable[[str], None],
) -> ControlLine | None:
    """The line of this rank, which has said its first words; None, after a sentence, where nobody listens."""
    import torch

    try:
        line = ControlLine(Path(config.runtime_dir) / "control.sock", name=f"rank-{who.rank}", on_order=on_order, on_lost=on_lost)
    except OSError as error:
        say(f"the node process cannot be reached ({error}); this rank is recorded, but not guarded")
        return None
    line.start()
    hello = RankHello(
        rank=who.rank, local_rank=who.local_rank, world_size=who.world_size, pid=os.getpid(), attempt=who.attempt, host=socket.gethostname(),
        version=config.version, torch_version=torch.__version__,
    )  # fmt: skip
    if line.send(hello):
        keeper.announce_watched()
    return line
