"""A program on a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Screen"]


class Screen:
    """What a program has written to its terminal so far."""

    def __init__(self, command: list[str], *, cwd: Path | None = None, variables: Mapping[str, str] = {}) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.text = b""
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=kept | {"TERM": "xterm"} | dict(variables)
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def finished(self, timeout_s: float = 60) -> str:
        """All that it wrote, once it has ended."""
        self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return self.text.decode().replace("\r\n", "\n")

    def _read(self, terminal: int) -> None:
        try:
            while part := os.read(terminal, 4096):
                self.text += part
        except OSError:
            pass  # the other side is closed
        os.close(terminal)
