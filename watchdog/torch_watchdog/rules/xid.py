"""The catalogue of Xid codes, the driver's words for what went wrong on a GPU: what each means, whose fault it usually is, what to do.

Owns the reading of the table; its text comes as an argument, from the package's own file. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch_watchdog_proto.messages import EXIT_BAD_DATA, EXIT_MACHINE

__all__ = ["XidCode", "exit_code_of", "read_codes"]

Owner: TypeAlias = Literal["application", "driver", "hardware", "fabric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class XidCode:
    """One code. `owner`: whose fault it usually is."""

    code: int
    name: str
    meaning: str
    owner: Owner
    action: str
    severity: Literal["info", "warning", "critical"]


def read_codes(text: str) -> dict[int, XidCode]:
    """By code. `text`: a table with tabs, the first line names the columns code, name, meaning, likely_owner, usual_action, severity."""
    codes = {}
    for line in text.splitlines()[1:]:
        code, name, meaning, owner, action, severity = line.split("\t")
        codes[int(code)] = XidCode(code=int(code), name=name, meaning=meaning, owner=owner, action=action, severity=severity)  # type: ignore[arg-type]
    return codes


def exit_code_of(seen: Iterable[int], codes: Mapping[int, XidCode]) -> int | None:
    """Of a job that failed after these codes: 75 where a machine must be left, 65 where the program must be mended; None where they do not decide.

    A fault of the hardware counts more than one of the program, which may follow from it.
    """
    known = [codes[code] for code in seen if code in codes]
    if any(code.owner in ("hardware", "fabric") and code.severity == "critical" for code in known):
        return EXIT_MACHINE
    if any(code.owner == "application" and code.severity != "info" for code in known):
        return EXIT_BAD_DATA
    return None
