"""The decision register: one write-once word per order, in the job's own c10d store, through a client of ours.

It outlives the daemon: a decision that one rank acts on is found there by every other rank. Without a reachable store a word lives in this process only: then a
daemon that dies between its words may leave ranks stopped at different steps, which is said once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch_watchdog_proto.frames import Decoder, encode
from torch_watchdog_proto.messages import Commit

__all__ = ["DecisionRegister"]

_ABANDONED = b"abandoned"
_TIMEOUT_S = 5.0


class DecisionRegister:
    """`decide` may be called from any thread and returns within a few seconds."""

    def __init__(self, environment: Mapping[str, str], *, attempt: int, world_size: int, say: Callable[[str], None]) -> None:
        self._address = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
        self._attempt, self._world_size, self._say = attempt, world_size, say
        self._lock = threading.Lock()
        self._store: Any = None
        self._own: dict[int, Commit | None] = {}

    def decide(self, generation: int, commit: Commit | None) -> tuple[Commit | None, bool]:
        """Puts `commit` (None: abandoned) into the register unless something stands there. What does, and True; (None, False) where none can be reached."""
        with self._lock:
            if self._world_size == 1:
                return self._own.setdefault(generation, commit), True
            try:
                return self._decide(generation, commit), True
            except Exception as error:  # noqa: BLE001  torch raises several kinds; a healthy job goes on whatever it is
                self._say(
                    f"the job's store cannot be reached ({type(error).__name__}): this rank goes on without a decision on order {generation}"
                )
                self._store = None
                return None, False

    def _decide(self, generation: int, commit: Commit | None) -> Commit | None:
        desired = _ABANDONED if commit is None else encode(commit)
        stands = self._opened().compare_set(f"order/{generation}", "", desired.decode("latin-1"))
        word = stands if isinstance(stands, bytes) else str(stands).encode("latin-1")
        return _commit_of(word)

    def _opened(self) -> Any:
        if self._store is None:
            from datetime import timedelta

            from torch.distributed import PrefixStore, TCPStore

            host, port = self._address
            if not host or not port:
                raise ConnectionError("MASTER_ADDR and MASTER_PORT are not set")
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT_S))
            self._store = PrefixStore(f"torch_watchdog/{self._attempt}", store)
        return self._store


def _commit_of(word: bytes) -> Commit | None:
    if word == _ABANDONED:
        return None
    decoded = Decoder().feed(_unmangled(word))
    if len(decoded) != 1 or not isinstance(decoded[0], Commit):
        raise ValueError("the register holds something that is no decision")
    return decoded[0]


def _unmangled(word: bytes) -> bytes:
    """The store takes text and hands back its UTF-8: one byte of ours is one character of it."""
    return word.decode().encode("latin-1")
