"""The tables that come with the package: read once, at the edge, so that the cores get them as arguments.

Owns the files under rules/knowledge; what their lines mean is read by the rules.
"""

from __future__ import annotations

import functools
from importlib import resources

from torch_watchdog.rules.assertions import Catalogue
from torch_watchdog.rules.xid import XidCode, read_codes

__all__ = ["known_assertions", "xid_codes"]


@functools.cache
def known_assertions() -> Catalogue:
    """The catalogue of device-side assertions."""
    return Catalogue.from_text(_table("kernel_asserts.tsv"))


@functools.cache
def xid_codes() -> dict[int, XidCode]:
    """The catalogue of Xid codes."""
    return read_codes(_table("xid_codes.tsv"))


def _table(name: str) -> str:
    return (resources.files("torch_watchdog.rules") / "knowledge" / name).read_text(encoding="utf-8")
