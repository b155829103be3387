"""Which rank a process is. Owns how that is read from the environment that a launcher makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which rank this process is, as the launcher told it. `attempt` is torchrun's restart count."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    attempt: int

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> Identity:
        def number(name: str, default: int) -> int:
            return int(environment.get(name) or default)

        world_size = number("WORLD_SIZE", 1)
        return cls(
            rank=number("RANK", 0), local_rank=number("LOCAL_RANK", 0), world_size=world_size,
            local_world_size=number("LOCAL_WORLD_SIZE", world_size), attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        )  # fmt: skip
