"""accelerate's Accelerator."""

from __future__ import annotations

from torch_watchdog_agent.hooks.accelerate import patch_accelerator as patch

__all__ = ["patch"]
