"""Asking a running daemon, for the command line: synchronous, one call a question."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from torch_watchdog_proto.envelopes import JobStatus, OrderAnswer, OrderKind
from torch_watchdog_proto.messages import StepBlock

__all__ = ["DaemonClient"]


class DaemonClient:
    """`address` is `unix:PATH` or `HOST:PORT`. Every method raises DaemonUnreachableError, UnknownJobError or DaemonRefusedError (all WatchdogError)."""

    def __init__(self, address: str, *, token: str = "", timeout_s: float = 5.0) -> None: ...

    def jobs(self) -> tuple[JobStatus, ...]:
        """Every job that this daemon knows, newest first; without their ranks."""
        raise NotImplementedError

    def job(self, name: str) -> JobStatus:
        """One job with its ranks."""
        raise NotImplementedError

    def incidents(self, name: str) -> tuple[Mapping[str, Any], ...]:
        """The job's incidents as their JSON objects, oldest first."""
        raise NotImplementedError

    def steps(
        self, name: str, rank: int | None = None, first_step: int | None = None, last_step: int | None = None
    ) -> tuple[StepBlock, ...]:
        """The blocks that hold any step of the range (inclusive), in the order in which they came."""
        raise NotImplementedError

    def request(self, name: str, kind: OrderKind, *, by: str, reason: str = "") -> OrderAnswer:
        """Asks the job for a clean stop or a checkpoint."""
        raise NotImplementedError

    def contract(self, name: str, rank: int = 0) -> Mapping[str, Any]:
        """What the rank has learned about its batches, as it wrote it to `contract/rank-R.json`."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the channel."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
