"""Namespaces that tests start commands in: with a file system of their own (a full disk, a /dev/shm that is read-only), or with processes of their own.

Owns whether this machine gives them, and the reason that pytest shows where it does not: the tool is missing, or the kernel or a container refuses.
"""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest

__all__ = ["PROCESSES", "needs_mounts", "needs_processes", "where_mounted"]

PROCESSES = ("unshare", "--mount", "--pid", "--fork", "--mount-proc")  # what follows is the first process there; needs root


def where_mounted(options: str, place: object, command: list[str]) -> list[str]:
    """The command as it runs where a tmpfs with these options lies at that place; nobody else sees it."""
    return ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs "{place}" && exec "$@"', "sh", *command]


@functools.cache
def refusal(*entering: str) -> str | None:
    """Why nothing can be started that way here; nothing where it can."""
    if shutil.which("unshare") is None:
        return "not installed here: apt-get install util-linux"
    tried = subprocess.run([*entering, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"this machine gives us no such namespaces: {tried.stderr.strip()}"


def _needs(*entering: str) -> pytest.MarkDecorator:
    why = refusal(*entering)
    return pytest.mark.skipif(why is not None, reason=why or "")


needs_mounts = _needs(*where_mounted("ro", "/dev/shm", []))
needs_processes = _needs(*PROCESSES)
