"""The folders of a launch: private, short, gone at the end; those of dead launches are swept, those of live ones never."""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_watchdog.launch.places import open_runtime_dir

DIES = """
import os, sys
from torch_watchdog.launch.places import open_runtime_dir
with open_runtime_dir("dead", {"TMPDIR": sys.argv[1]}):
    os._exit(9)
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path: a socket's path must fit behind it, and pytest's own folders are too deep for that."""
    with tempfile.TemporaryDirectory(prefix="tw", dir="/tmp") as path:
        yield Path(path)


def test_a_folder_is_private_and_gone_at_the_end(short: Path) -> None:
    with open_runtime_dir("s1", {"TMPDIR": str(short)}) as path:
        assert path.is_relative_to(short)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        (path / "left-over").write_text("x")
    assert not path.exists()


def test_what_a_dead_launch_left_is_swept_by_the_next(short: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(short)], timeout=30, check=False)
    (left,) = short.glob("*/dead")
    with open_runtime_dir("s2", {"TMPDIR": str(short)}):
        assert not left.exists()


def test_a_live_launch_is_never_swept(short: Path) -> None:
    environment = {"TMPDIR": str(short)}
    with open_runtime_dir("s1", environment) as first, open_runtime_dir("s2", environment):
        assert first.exists()


def test_a_path_that_is_too_long_for_a_socket_is_passed_over(short: Path) -> None:
    with open_runtime_dir("s1", {"TMPDIR": str(short / ("x" * 90))}) as path:
        assert path.is_relative_to("/tmp")


def test_a_folder_that_others_can_enter_is_not_used(short: Path) -> None:
    with open_runtime_dir("s1", {"TMPDIR": str(short)}) as path:
        base = path.parent
    assert base.is_relative_to(short)
    base.chmod(0o777)
    with open_runtime_dir("s2", {"TMPDIR": str(short)}) as path:
        assert not path.is_relative_to(short)


def test_a_link_in_the_place_of_our_folder_is_not_followed(short: Path) -> None:
    with open_runtime_dir("s1", {"TMPDIR": str(short)}) as path:
        base = path.parent
    assert base.is_relative_to(short)
    elsewhere = short / "elsewhere"
    for left in base.iterdir():
        left.unlink()
    base.rmdir()
    elsewhere.mkdir(mode=0o700)
    base.symlink_to(elsewhere)
    with open_runtime_dir("s2", {"TMPDIR": str(short)}) as path:
        assert not path.is_relative_to(short)
    assert list(elsewhere.iterdir()) == []
