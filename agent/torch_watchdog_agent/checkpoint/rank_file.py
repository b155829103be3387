"""What one rank keeps for itself in a checkpoint: `rank-R.json` and `rank-R.safetensors`.

Owns the form of these two files: position in the data, generators, number of updates, and the tensors that are not the same on every rank
although torch holds them as whole (BatchNorm statistics under DDP, hand-made tensor parallelism), and small objects that differ likewise (a loss that an
optimizer or a scheduler has kept). No pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from torch_watchdog_agent.checkpoint.errors import RestoreError
from torch_watchdog_agent.checkpoint.files import sync, write_json
from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState

_VERSION = 1
_OWN = "own."


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """`own` are this rank's tensors by their name in the checkpoint, `values` its small objects; `finite` speaks of all that this rank holds."""

    rank: int
    world_size: int
    updates_applied: int
    position: LoaderPosition
    rng: RngState
    finite: bool
    own: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    not_covered: tuple[str, ...] = ()

    def write(self, directory: Path) -> None:
        from safetensors.torch import save

        position, position_tensors = self.position.to_parts()
        rng, rng_tensors = self.rng.to_parts("rng")
        own = {_OWN + name: tensor for name, tensor in self.own.items()}
        # safetensors refuses tensors that share memory (a position whose two states are one): give each its own.
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in (position_tensors | rng_tensors | own).items()}
        path = directory / f"rank-{self.rank}.safetensors"
        path.write_bytes(save(tensors))
        sync(path)
        plain = {"version": _VERSION, "rank": self.rank, "world_size": self.world_size, "updates_applied": self.updates_applied}
        more = {"finite": self.finite, "position": position, "rng": rng, "own": sorted(self.own), "not_covered": list(self.not_covered)}
        write_json(directory / f"rank-{self.rank}.json", plain | more | {"values": dict(self.values)})

    @classmethod
    def read(cls, directory: Path, rank: int) -> Self:
        from safetensors.torch import load_file

        plain = json.loads((directory / f"rank-{rank}.json").read_text())
        if plain["version"] != _VERSION:
            what = f"its rank-{rank}.json has form {plain['version']}, this version reads {_VERSION}"
            raise RestoreError(directory, what, "Resume with the version of torch-watchdog that wrote it")
        tensors = load_file(directory / f"rank-{rank}.safetensors")
        return cls(
            rank=plain["rank"],
            world_size=plain["world_size"],
            updates_applied=plain["updates_applied"],
            position=LoaderPosition.from_parts(plain["position"], tensors),
            rng=RngState.from_parts("rng", plain["rng"], tensors),
            finite=plain["finite"],
            own={name: tensors[_OWN + name] for name in plain["own"]},
            values=plain.get("values", {}),
            not_covered=tuple(plain["not_covered"]),
        )

    @classmethod
    def of(cls, directory: Path, manifest: Mapping[str, Any], *, rank: int, world_size: int) -> tuple[Self, bool]:
        """This rank's own part, and True; or, where it wrote none, what stands in for it, and False: its generators then are not its own."""
        savers = sorted(manifest["ranks"])
        if manifest["world_size"] == world_size and rank in savers:
            return cls.read(directory, rank), True
        return replace(cls.read(directory, savers[0]), own={}, values={}), False


def without_random_state(rank: int, directory: Path) -> str:
    """Of a rank that has no part of its own there."""
    return (
        f"rank {rank} finds no random state of its own in {directory} (it had failed, or did not save): its next random numbers (dropout, augmentation) "
        "are others than they would have been; weights and optimizer are not touched by that"
    )
