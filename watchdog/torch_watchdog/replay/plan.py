"""What a replay runs: one process of the user's script, with the recorded batch in the place of its first.

Owns the command and its environment. Pure: words and mappings in, words and mappings out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["MISLEADING", "environment_of", "script_of"]

MISLEADING = (
    "on the CPU some faults look different or do not show: ctc_loss with a label past the classes, NaN cast to an integer, "
    "and what only fails on a second device"
)


def script_of(command: Sequence[str]) -> tuple[str, ...]:
    """The script and its arguments of a launch, without the launcher before it; empty where none can be told."""
    for position, word in enumerate(command):
        if word.endswith(".py"):
            return tuple(command[position:])
    return ()


def environment_of(environment: Mapping[str, str], *, cuda: bool, port: int) -> dict[str, str]:
    """One rank of one, on the CPU, or on the GPU with every kernel waited for."""
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    where = {"CUDA_LAUNCH_BLOCKING": "1"} if cuda else {"CUDA_VISIBLE_DEVICES": ""}
    return {**environment, **alone, **where}
