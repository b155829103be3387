"""A report as Markdown, for an issue tracker: short, and safe to paste.

Pure. A sentence reads as one; whatever in it is no plain word, and so may come from the user's data, stands in code, where no tracker makes a link, a
mention or an image of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch_watchdog.job.incident import number
from torch_watchdog.report.evidence import Evidence, Excerpt
from torch_watchdog.report.figures import rank_figures, versions
from torch_watchdog.report.history import JobHistory
from torch_watchdog.report.story import card_of, next_steps, story

__all__ = ["markdown_report"]

_PLAIN = re.compile(r"\(?(?:[A-Za-z]+(?:['-][A-Za-z]+)*|\d+(?:\.\d+)?%?)'?\)?[,;:.!?]?\)?|=")
_WORD = re.compile(r"(?:`[^`]*`|\S)+")
_LIKE_A_COMMIT = re.compile(r"\(?[0-9a-f]{7}")
_MAX_RANKS = 16
_LOG_LINES = 25


def markdown_report(history: JobHistory, evidence: Evidence, last_words: Sequence[str]) -> str:
    """All of it. `last_words`: the launch's own, of which what to type is taken."""
    found = history.main_incident
    parts = [f"## Job {_code(history.name)}", "\n".join(f"* {_prose(sentence)}" for sentence in story(history))]
    if found is not None:
        parts += ["### What was found", _table(("", ""), [(name, _prose(text)) for name, text in card_of(found).items()])]
    if evidence.excerpt is not None:
        parts += ["### The batch around the bad element", *_batch(evidence.excerpt)]
    parts += ["### Ranks", _ranks(history)]
    for tail in evidence.logs[:2]:
        parts += [f"### Log of rank {tail.rank}", _block("\n".join(tail.lines[-_LOG_LINES:]))]
    parts += ["### Versions", _table(("", ""), [(_code(name), _code(version)) for name, version in versions(history).items()])]
    steps = next_steps(history, last_words)
    if steps:
        parts += ["### Next", *(_block(step.text) if step.is_command else _prose(step.text) for step in steps)]
    return "\n\n".join(parts) + "\n"


def _batch(excerpt: Excerpt) -> list[str]:
    """Where it is, the values with the bad one between brackets, and the text where a tokenizer was given."""
    row = str(list(excerpt.row)) if excerpt.row else ""
    where = f"{_code(excerpt.key + row)}, values {excerpt.first} to {excerpt.first + len(excerpt.values) - 1}, the bad one in brackets:"
    values = " ".join(f"[{number(value)}]" if place == excerpt.bad else number(value) for place, value in enumerate(excerpt.values))
    return [where, _block(values), *([] if excerpt.text is None else ["As text, by the tokenizer that was given:", _block(excerpt.text)])]


def _ranks(history: JobHistory) -> str:
    rows = []
    for figures in rank_figures(history)[:_MAX_RANKS]:
        seconds = figures["median_step_s"]
        time = "" if seconds is None else f"{seconds * 1000:.3g} ms"
        cells = (figures["rank"], figures["node"], figures["steps"], figures["updates"], time, figures["last_loss"])
        rows.append(tuple("" if cell in (None, "") else _prose(number(cell)) for cell in cells))
    return _table(("rank", "node", "steps", "updates", "median step", "last loss"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _prose(text: str) -> str:
    """Words and numbers as they are, all else of a line in code; what lies between two pieces of code joins them."""
    pieces: list[tuple[bool, list[str]]] = []
    for word in _WORD.findall(text):
        is_plain = bool(_PLAIN.fullmatch(word)) and not _LIKE_A_COMMIT.match(word)
        if word.count("`") % 2 == 0:  # code by its own account: of two fences one is too many
            word = word.replace("`", "") or word
        if pieces and pieces[-1][0] == is_plain and not word.startswith("("):
            pieces[-1][1].append(word)
        else:
            pieces.append((is_plain, [word]))
    return " ".join(" ".join(words) if is_plain else _coded(" ".join(words)) for is_plain, words in pieces)


def _coded(text: str) -> str:
    """Marks and brackets of the sentence around it stay outside."""
    begin = "(" if text.startswith("(") and len(text) > 1 else ""
    inner, end = text.removeprefix(begin), ""
    while len(inner) > 1 and (inner[-1] in ",;:." or (inner[-1] == ")" and inner.count(")") > inner.count("("))):
        inner, end = inner[:-1], inner[-1] + end
    return f"{begin}{_code(inner)}{end}"


def _code(text: str) -> str:
    """As code, whatever backticks it holds; a bar would end the cell."""
    text = " ".join(text.split()).replace("|", "\\|")
    if not text:
        return ""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(text: str) -> str:
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}text\n{text}\n{fence}"
