"""Who types a command or starts a launch, in words."""

from __future__ import annotations

import getpass
import os
import socket

__all__ = ["caller", "user_name"]


def user_name() -> str:
    """Any user id will do in a container, also one without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def caller() -> str:
    """`ann@login1`."""
    return f"{user_name()}@{socket.gethostname()}"
