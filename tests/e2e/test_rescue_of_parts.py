"""HSDP, four ranks: one is killed, and two others that hold the whole state in parts save it together, bit by bit as it was after the last update."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import Ended, launch, script, torchrun, watchdog

from torch_watchdog_agent.checkpoint.manifest import verify
from torch_watchdog_proto.fault_points import VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def trained(folder: Path, *kill: int, ranks: int = 4, **more: str) -> Ended:
    return launch(folder, [*watchdog(), *torchrun(*script("hsdp.py", "--kill", *kill), ranks=ranks)], **more)


@pytest.mark.parametrize(
    ("kill", "savers"),
    [pytest.param((3,), [0, 1], marks=pytest.mark.slow), ((0, 3), [1, 2])],
    ids=["one copy is whole", "each copy has lost a shard"],
)
def test_what_is_left_of_the_copies_is_saved_as_one_whole(tmp_path: Path, kill: tuple[int, ...], savers: list[int]) -> None:
    run = trained(tmp_path, *kill)
    (incident,) = run.incidents
    checkpoint = incident["action"]["checkpoint"]
    assert checkpoint is not None, incident["cause"] + run.err
    assert (incident["kind"], checkpoint["saved_by"], checkpoint["committed"], checkpoint["updates_applied"]) == (
        "rank.died",
        savers,
        True,
        5,
    )
    assert sorted(path.name for path in Path(checkpoint["path"]).iterdir() if path.is_dir()) == []
    restored = launch(tmp_path, torchrun(*script("hsdp.py", "--check", checkpoint["path"]), ranks=4))
    digests = dict(re.findall(r"rank (\d) restored 5 (\w+)", restored.out))
    assert len(digests) == 4, restored.err
    for rank in sorted({0, 1, 2, 3} - set(kill)):
        assert f"5 {digests[str(rank)]}" in (tmp_path / f"trail-{rank}").read_text().splitlines()


@pytest.mark.parametrize("point", [pytest.param("rank-0 got WriteCommitted", marks=pytest.mark.slow), "rank-0 before Committed"])
def test_where_the_rank_that_seals_dies_the_whole_is_sealed_all_the_same(tmp_path: Path, point: str) -> None:
    """Before it has, or behind it and before its word."""
    (incident,) = trained(tmp_path, 3, **{VARIABLE: point}).incidents
    checkpoint = incident["action"]["checkpoint"]
    assert checkpoint is not None, incident["cause"]
    assert (checkpoint["saved_by"], checkpoint["committed"], checkpoint["updates_applied"]) == ([1, 2], True, 5)
    assert verify(Path(checkpoint["path"]))["updates_applied"] == 5


def test_where_a_part_is_gone_with_all_its_copies_nothing_is_called_whole(tmp_path: Path) -> None:
    (incident,) = trained(tmp_path, 1, 3).incidents
    assert incident["action"]["checkpoint"] is None
    assert "shards the parameters" in incident["cause"]


@pytest.mark.slow
def test_a_copy_that_lies_on_one_rank_is_saved_by_it(tmp_path: Path) -> None:
    (incident,) = trained(tmp_path, 1, ranks=2).incidents
    checkpoint = incident["action"]["checkpoint"]
    assert checkpoint is not None, incident["cause"]
    assert (checkpoint["saved_by"], checkpoint["committed"], checkpoint["updates_applied"]) == ([0], True, 5)
    restored = launch(tmp_path, torchrun(*script("hsdp.py", "--check", checkpoint["path"]), ranks=2))
    digests = dict(re.findall(r"rank (\d) restored 5 (\w+)", restored.out))
    assert len(digests) == 2, restored.err
    assert f"5 {digests['0']}" in (tmp_path / "trail-0").read_text().splitlines()
