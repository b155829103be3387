"""The real servers that tests marked `services` talk to: found where Debian puts them, and said where they are not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

__all__ = ["needs", "program"]

_T = TypeVar("_T", bound=Callable[..., object])
_PACKAGES = {
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "initdb": "postgresql",
    "postgres": "postgresql",
}


def program(name: str) -> str | None:
    """Its path; PostgreSQL's are not on the PATH."""
    found = shutil.which(name)
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    return found if found or not versions else str(versions[-1])


def needs(*names: str) -> Callable[[_T], _T]:
    """A decorator: marks the test `services`, and says what to install where something is not there."""
    absent = sorted({_PACKAGES[name] for name in names if program(name) is None})
    skip = pytest.mark.skipif(bool(absent), reason=f"not installed here: apt-get install {' '.join(absent)}")
    return lambda test: pytest.mark.services(skip(test))
