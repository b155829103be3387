"""A rank that has no part in a checkpoint of another's (a rescue's) goes on with generators of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint_state import subjects_of
from torch.utils.data import DataLoader, TensorDataset

from torch_watchdog_agent.checkpoint import restore
from torch_watchdog_agent.checkpoint.alone import save_alone
from torch_watchdog_agent.checkpoint.manifest import commit
from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.hooks import loader as loader_hooks

SAVER_SEED, OWN_SEED = 100, 101


def saved_by(rank: int, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    torch.manual_seed(SAVER_SEED)
    position = LoaderPosition(epoch=0, batches=1, rng_at_iter=RngState.capture(), rng=RngState.capture())
    part = save_alone(folder / "step-1", subjects_of(optimizer), rank=rank, updates_applied=1, position=position, say=lambda _: None)
    files = [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in part.files]
    manifest = {"updates_applied": 1, "ranks": [rank], "world_size": 1, "files": files, "finite": True, "format": part.format}
    return commit(part.path, manifest, good=True, ours=False)


def drawn_after_resume(saver: int, folder: Path) -> tuple[float, float]:
    """By rank 0, in the step that it goes on with; and what it would have drawn by itself."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    path = saved_by(saver, folder, model, optimizer)
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=1, shuffle=True)
    torch.manual_seed(OWN_SEED)
    own = float(torch.rand(()))
    torch.manual_seed(OWN_SEED)
    assert restore(model=model, optimizer=optimizer, loader=loader, path=path) is not None
    for _ in loader:
        break
    return float(torch.rand(())), own


def test_the_savers_generators_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    import torch.utils.data.dataloader as module

    loader_hooks.patch(module)
    found, own = drawn_after_resume(1, tmp_path / "another's")
    assert found == own
    torch.manual_seed(SAVER_SEED)
    saver = float(torch.rand(()))
    found, _ = drawn_after_resume(0, tmp_path / "its own")
    assert found == saver
