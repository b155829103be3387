"""START HERE for the daemon."""

from __future__ import annotations

from torch_watchdog.daemon.config import DaemonConfig

__all__ = ["run_daemon"]


async def run_daemon(config: DaemonConfig) -> None:
    """Serves until cancelled. Raises DaemonStartError where it cannot listen."""
    raise NotImplementedError
