"""torchdata's StatefulDataLoader."""

from __future__ import annotations

from torch_watchdog_agent.hooks.loader import patch_stateful as patch

__all__ = ["patch"]
