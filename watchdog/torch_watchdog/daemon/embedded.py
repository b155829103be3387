"""The daemon inside another process: a thread with its own event loop, for the launcher."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from torch_watchdog.daemon.config import DaemonConfig

__all__ = ["EmbeddedDaemon"]


class EmbeddedDaemon:
    """Context manager: inside it the daemon answers at `addresses`. Leaving it flushes the store, in bounded time."""

    def __init__(self, config: DaemonConfig) -> None: ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, in the order of `config.listen`, with the real port where 0 was asked for."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Returns once it listens. Raises DaemonStartError."""
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
