"""START HERE for the node process: its thread, its event loop, its parts."""

from __future__ import annotations

from collections.abc import Callable

from torch_watchdog_agent.node.config import JobOutcome, NodeConfig

__all__ = ["NodeAgent"]


class NodeAgent:
    """Speaks for the ranks of one node. All of it runs in one thread with its own event loop; nothing here raises into the launcher."""

    def __init__(self, config: NodeConfig, *, say: Callable[[str], None]) -> None:
        """`say` gets one line for the terminal, with its `[torch-watchdog]` prefix; it is called from the agent's thread."""

    def start(self) -> None:
        """Opens `runtime_dir/control.sock`, then begins to read rings and to report. Returns once the socket listens, so that ranks can be started."""

    def finish(self, exit_code: int, signal: int | None = None, *, timeout_s: float = 10.0) -> JobOutcome:
        """Call once the wrapped command has ended: reads what the rings still hold, reports it, asks the daemon how the job ended.

        Returns within `timeout_s`, whatever the daemon does; then with `exit_code=None` and a line that says what is missing.
        """
        raise NotImplementedError
