"""What a replay runs: one process of the user's script, with the recorded batch in the place of its first.

Owns the command and its environment. Pure: words and mappings in, words and mappings out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["doubts", "environment_of", "script_of"]

_ALWAYS = "what only fails on a second device, as a tensor that was left on another one, cannot fail on the CPU"
_CTC = "ctc_loss is in this training: for a label past the classes a GPU reports nothing and computes garbage, the CPU may pass it, raise, or end the process"


def doubts(*, ops: Collection[str], not_finite: Sequence[str]) -> tuple[str, ...]:
    """Where the CPU may tell another story than the GPU did. `ops`: of the contract that the rank had learned; `not_finite`: tensors of the batch that
    hold NaN or infinity."""
    found = [_CTC] if any("ctc" in op for op in ops) else []
    if not_finite:
        found.append(
            f"{', '.join(not_finite[:4])} holds NaN or infinity: cast to an integer that is the smallest one on the CPU, 0 or garbage on a GPU, "
            "so that an index made of it can fail on the one and pass on the other"
        )
    return (*found, _ALWAYS)


def script_of(command: Sequence[str]) -> tuple[str, ...]:
    """The script and its arguments of a launch, without the launcher before it; empty where none can be told."""
    for position, word in enumerate(command):
        if word.endswith(".py"):
            return tuple(command[position:])
    return ()


def environment_of(environment: Mapping[str, str], *, cuda: bool, port: int) -> dict[str, str]:
    """One rank of one, on the CPU, or on the GPU with every kernel waited for. Nothing is compiled: the stack of compiled code has no line of the model's."""
    alone = {
        "TORCHDYNAMO_DISABLE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    where = {"CUDA_LAUNCH_BLOCKING": "1"} if cuda else {"CUDA_VISIBLE_DEVICES": ""}
    return {**environment, **alone, **where}
