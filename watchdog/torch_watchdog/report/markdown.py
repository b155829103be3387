"""A report as Markdown, for an issue tracker: short, and safe to paste.

Pure. Whatever comes from the user's data stands in code, where no tracker makes a link, a mention or an image of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch_watchdog.report.evidence import Evidence
from torch_watchdog.report.figures import rank_figures, versions
from torch_watchdog.report.history import JobHistory
from torch_watchdog.report.story import facts_of, next_steps, story

__all__ = ["markdown_report"]

_MAX_RANKS = 16
_LOG_LINES = 25


def markdown_report(history: JobHistory, evidence: Evidence, last_words: Sequence[str]) -> str:
    found = history.main_incident
    parts = [f"## Job {_code(history.name)}", "\n".join(f"* {_code(sentence)}" for sentence in story(history))]
    if found is not None:
        parts += ["### What was found", _table(("", ""), [(name, _code(text)) for name, text in facts_of(found).items()])]
    if evidence.excerpt is not None:
        parts += ["### The batch", _block(" ".join(map(str, evidence.excerpt.values)))]
    parts += ["### Ranks", _ranks(history)]
    for tail in evidence.logs[:2]:
        parts += [f"### Log of rank {tail.rank}", _block("\n".join(tail.lines[-_LOG_LINES:]))]
    parts += ["### Versions", _table(("", ""), [(_code(name), _code(version)) for name, version in versions(history).items()])]
    steps = next_steps(history, last_words)
    if steps:
        parts += ["### Next", *(_block(step.text) if step.is_command else _code(step.text) for step in steps)]
    return "\n\n".join(parts) + "\n"


def _ranks(history: JobHistory) -> str:
    rows = []
    for figures in rank_figures(history)[:_MAX_RANKS]:
        seconds = figures["median_step_s"]
        time = "" if seconds is None else f"{seconds * 1000:.3g} ms"
        rows.append(tuple(_code(str(cell)) if cell not in (None, "") else "" for cell in (
            figures["rank"], figures["node"], figures["steps"], figures["updates"], time, figures["last_loss"],
        )))  # fmt: skip
    return _table(("rank", "node", "steps", "updates", "median step", "last loss"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _code(text: str) -> str:
    """As code, whatever backticks it holds; a bar would end the cell."""
    text = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(text: str) -> str:
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}text\n{text}\n{fence}"
