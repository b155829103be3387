"""Pieces of one state, each written by a rank that speaks to nobody, are one checkpoint once they are joined."""

from __future__ import annotations

import multiprocessing
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from checkpoint_state import MOMENT, subjects_of
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_watchdog_agent.checkpoint.alone import save_alone
from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.manifest import commit, verify
from torch_watchdog_agent.checkpoint.part import SavedPart
from torch_watchdog_agent.checkpoint.pieces import join, swept
from torch_watchdog_agent.rescue.replica import holdings, part_of

pytestmark = pytest.mark.e2e


def model_of(seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))


def piece(path: Path, rank: int) -> tuple[tuple[int, int], SavedPart]:
    """What that rank of four, two copies of two shards, says of itself and writes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        model = model_of()
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        subjects = subjects_of(optimizer)
        state = subjects.now()
        assert holdings(state, world_size=4, updates=1)[0] == "part"
        part, parts = part_of(state, world_size=4)
        moment = {name: MOMENT[name] for name in ("updates_applied", "position")}
        return (part, parts), save_alone(path, subjects, rank=rank, say=lambda _: None, part=part, **moment)
    finally:
        dist.destroy_process_group()


def told_by(model: torch.nn.Module) -> tuple[int, int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = subjects_of(optimizer).now()
    assert state.optimizers
    return part_of(state, world_size=4)


def full_shard(rank: int) -> tuple[int, int]:
    """What a rank says of itself where all four share one copy."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        model = model_of()
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        return told_by(model)
    finally:
        dist.destroy_process_group()


def manifest_of(pieces: dict[int, SavedPart]) -> dict[str, Any]:
    files = [asdict(file) for saved in pieces.values() for file in saved.files]
    ranks = sorted(pieces)
    return {"updates_applied": 2, "ranks": ranks, "world_size": 4, "files": files, "finite": True, "format": "dcp"}


Pieces = dict[int, tuple[tuple[int, int], SavedPart]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pieces]:
    """What each of four ranks, processes of their own, wrote of itself into a folder of its own."""
    folder = tmp_path_factory.mktemp("ranks")
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        found = pool.starmap(piece, [(folder / f"rank-{rank}" / "step-2", rank) for rank in range(4)], chunksize=1)
    return folder, dict(enumerate(found))


def together(written: tuple[Path, Pieces], path: Path, *ranks: int) -> dict[int, SavedPart]:
    """As if these ranks had written beside one another."""
    folder, pieces = written
    for rank in ranks:
        shutil.copytree(folder / f"rank-{rank}" / "partial.step-2", path.parent / "partial.step-2", dirs_exist_ok=True)
    return {rank: pieces[rank][1] for rank in ranks}


def test_each_rank_knows_its_part(written: tuple[Path, Pieces]) -> None:
    assert {rank: told for rank, (told, _) in written[1].items()} == {0: (0, 2), 1: (1, 2), 2: (0, 2), 3: (1, 2)}


def test_where_there_is_one_copy_only_no_part_can_be_completed() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(full_shard, (1,)) == (0, 0)
    assert told_by(model_of()) == (0, 0)


@pytest.mark.parametrize("ranks", [(0, 1), (2, 1), (2, 3)])
def test_two_pieces_are_the_whole_wherever_they_come_from(written: tuple[Path, Pieces], tmp_path: Path, ranks: tuple[int, int]) -> None:
    path = tmp_path / "step-2"
    made = commit(path, join(path, manifest_of(together(written, path, *ranks)), parts=2), good=True)
    verify(made)
    expected = model_of()
    for parameter in expected.parameters():
        parameter.data.sub_(0.1 * parameter.data)  # one step of SGD on a gradient that equals the parameter
    read = {f"model.{name}": torch.empty_like(tensor) for name, tensor in expected.state_dict().items()}
    read |= {f"optimizer.state.{name}.momentum_buffer": torch.empty_like(tensor) for name, tensor in expected.named_parameters()}
    torch_dcp.load_state_dict(read, torch_dcp.FileSystemReader(made), no_dist=True)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(read[f"model.{name}"], tensor)
        assert torch.equal(read[f"optimizer.state.{name}.momentum_buffer"], model_of().state_dict()[name])


def test_a_part_alone_is_no_whole(written: tuple[Path, Pieces], tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    pieces = together(written, path, 0)
    with pytest.raises(OSError, match="part-1"):
        join(path, manifest_of(pieces), parts=2)
    shutil.copytree(tmp_path / "partial.step-2" / "partial.part-0", tmp_path / "partial.step-2" / "partial.part-1")
    with pytest.raises(CheckpointError, match="are not the whole of it"):
        join(path, manifest_of(pieces), parts=2)


def test_whoever_seals_may_die_before_it_has_and_another_does_it_with_a_part_of_its_own(
    written: tuple[Path, Pieces], tmp_path: Path
) -> None:
    path = tmp_path / "step-2"
    join(path, manifest_of(together(written, path, 0, 1)), parts=2)
    shutil.rmtree(tmp_path / "partial.step-2" / "partial.part-0")  # rank 2 begins that part anew
    pieces = together(written, path, 2) | {1: written[1][1][1]}
    made = commit(path, join(path, manifest_of(pieces), parts=2), good=True)
    assert sorted(verify(made)["ranks"]) == [1, 2] and not (made / "rank-0.json").exists()
    swept(path)
    assert not any(file.is_dir() for file in made.iterdir())
    verify(made)


def test_what_an_earlier_attempt_left_half_written_is_not_in_the_whole(written: tuple[Path, Pieces], tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    pieces = together(written, path, 0, 1)
    for name in ("__2_0.distcp", "rank-7.json"):
        (tmp_path / "partial.step-2" / name).touch()
    made = commit(path, join(path, manifest_of(pieces), parts=2), good=True)
    swept(path)
    assert not {"__2_0.distcp", "rank-7.json"} & {file.name for file in made.iterdir()}
    assert not any(file.is_dir() for file in made.iterdir())
