"""What a bound asks of a batch, in words: for every view the same.

Pure: an entry of a contract in, words out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_watchdog.phrases import allowed_range

__all__ = ["must_be"]


def must_be(row: Mapping[str, Any]) -> str:
    """Both ends of a range are allowed."""
    bound = row.get("bound") or {}
    ignored = ", ".join(map(str, bound.get("ignored") or ()))
    match row.get("kind"):
        case "some":
            return f"not {ignored} everywhere"
        case "rows":
            return "something visible in every row"
        case "groups":
            return "as many in every row"
        case "float":
            return "a floating-point dtype"
        case "spread":
            return "more than one value per channel"
        case "starts":
            return "0 first, never less than the one before"
        case "ctc":
            return f"{allowed_range(bound)}, and no longer than its frames allow"
        case "count" | "agree" | "sum" as kind:
            what = "sum" if kind == "sum" else "count"
            return f"{what} {bound.get('high')}" if bound.get("low") == bound.get("high") else f"{what} at most {bound.get('high')}"
        case _:
            return allowed_range(bound)
