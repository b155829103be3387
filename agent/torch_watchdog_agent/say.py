"""The agent's voice on the terminal: rare, once per sentence, never a reason to fail."""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["Voice"]


class Voice:
    """Says each sentence once, on standard error, after `[torch-watchdog]`. `also` gets every sentence too (the ring)."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._said: set[str] = set()
        self.also: Callable[[str], None] | None = None

    def __call__(self, text: str) -> None:
        if text in self._said or len(self._said) > 200:
            return
        self._said.add(text)
        try:
            os.write(2, f"[torch-watchdog] {self._prefix}{text}\n".encode(errors="replace"))
            if self.also is not None:
                self.also(text)
        except OSError:
            pass  # nobody listens: that must not hurt the training
