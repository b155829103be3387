"""The command as it was given, without us: where we are switched off, or cannot begin. Imports nothing that a broken installation may lack."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from torch_watchdog.errors import WatchdogError
from torch_watchdog.launch import signals
from torch_watchdog.launch.say import say

__all__ = ["EXIT_NOT_FOUND", "become", "become_for", "cannot_start", "described"]

EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127  # as a shell has them


def become(command: Sequence[str]) -> NoReturn:
    """The command, in the place of this process."""
    try:
        signals.replace_with(command, os.environ)
    except OSError as error:
        sys.exit(cannot_start(command, error))


def become_for(error: Exception, command: Sequence[str]) -> NoReturn:
    """The same, because of something of ours, which is told: no reason for the training not to run."""
    say(f"this launch runs without the watchdog: {described(error)}")
    become(command)


def cannot_start(command: Sequence[str], error: OSError) -> int:
    """Says it; the exit code."""
    say(f"{command[0]}: {error.strerror}")
    return EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE


def described(error: Exception) -> str:
    """Errors that are meant for a person speak for themselves; of others the kind is worth knowing."""
    return str(error) if isinstance(error, WatchdogError) else f"{type(error).__name__}: {error}"
