"""What most ranks have in common is one finding: thousands of incidents would say the same, and hide which rank is another case.

Pure: signs of each rank in, one in their place out. A rule that asks for it has `each_rank` (rules/sign.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch_watchdog.rules.named import out_of
from torch_watchdog.rules.sign import Sign

__all__ = ["FEW", "of_most", "together"]

FEW = 8  # ranks: so many are told one by one, also where they are all there are


def together(signs: Iterable[Sign], ranks: int) -> list[Sign]:
    """Of each subject one sign for more than `FEW` ranks that are more than half of the job's."""
    by_subject: dict[str, list[Sign]] = {}
    for sign in signs:
        by_subject.setdefault(sign.subject, []).append(sign)
    made = []
    for alike in by_subject.values():
        made += [_one_of(alike, ranks)] if len(alike) > FEW and 2 * len(alike) > ranks else alike
    return made


def of_most(subject: str) -> tuple[None, str]:
    """The subject of the one sign, as the engine has subjects: with the rank."""
    return None, f"most ranks {subject}".rstrip()


def _one_of(alike: Sequence[Sign], ranks: int) -> Sign:
    first = min(alike, key=lambda sign: sign.rank or 0)
    return replace(
        first,
        rank=None,
        subject=of_most(first.subject)[1],
        affected=tuple(sorted(sign.rank for sign in alike if sign.rank is not None)),
        said=f"{out_of(len(alike), ranks)}, as {first.said}",
        cause=f"most ranks at once: what they share is the reason (storage, data, code), not one of them. Of one of them: {first.cause}",
    )
