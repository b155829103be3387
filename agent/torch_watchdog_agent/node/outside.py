"""The Python stack of a rank that cannot tell it itself, read from outside by py-spy. Nothing where that is not installed, or may not read.

Owns that one call. The rank is not stopped for it; what it does meanwhile may blur the picture, and one that hangs does nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["stack_of"]

TIMEOUT_S = 2.0
MAX_STACK = 3000


def stack_of(pid: int) -> str:
    """May take as long as TIMEOUT_S: not for a loop's thread. Never raises; "" where there is nothing to tell."""
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        return ""
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return _main_thread(found.stdout, pid)


def _main_thread(dump: str, pid: int) -> str:
    """Its frames, innermost first, as py-spy has them; the training runs there."""
    threads = [part.partition("\n")[2] for part in dump.split("\nThread ")[1:] if part.startswith(f"{pid} ")]
    return "".join(f"{frames.strip(chr(10))}\n" for frames in threads[:1])[:MAX_STACK]
