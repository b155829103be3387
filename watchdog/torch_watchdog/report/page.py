"""The report of a job as one page: no script, no link to anywhere, every drawing inline, so that it opens from a mail with the network off.

Owns what is on it and in which order; its words are escaped by the template. Charts are SVG of our own: some kilobytes where a library's script is
five megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from torch_watchdog.job.incident import number
from torch_watchdog.phrases import count
from torch_watchdog.report import svg
from torch_watchdog.report.bounds import must_be
from torch_watchdog.report.counting import updates_beside
from torch_watchdog.report.evidence import Evidence
from torch_watchdog.report.figures import gpu_figures, rank_figures, values_by_step, versions
from torch_watchdog.report.history import JobHistory
from torch_watchdog.report.story import card_of, clock, next_steps, story
from torch_watchdog.report.strip import MARKS, cells_of, shown_range
from torch_watchdog_proto import __version__
from torch_watchdog_proto.names import spoken

__all__ = ["report_page", "timeline_page"]

_CELLS = 120
_MAX_ROWS = 96
_TEMPLATES = Environment(
    loader=PackageLoader("torch_watchdog.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def report_page(history: JobHistory, evidence: Evidence, last_words: Sequence[str]) -> str:
    """The whole page, as HTML. `last_words`: the launch's own, of which what to type is taken."""
    found = history.main_incident
    return _render(
        history,
        story=story(history),
        main=None if found is None else card_of(found),
        excerpt=evidence.excerpt,
        contract=[_bound(entry) for entry in evidence.contract],
        stacks=dict(evidence.stacks),
        logs=evidence.logs,
        versions=versions(history),
        next=next_steps(history, last_words),
    )


def timeline_page(history: JobHistory) -> str:
    """Only what the ranks did."""
    return _render(history, story=[], main=None, excerpt=None, contract=[], stacks={}, logs=[], versions={}, next=[])


def _render(history: JobHistory, **parts: Any) -> str:
    first, last = shown_range(history.tracks, history.incidents)
    rows, updates = _rows(history, first, last), updates_beside(history.tracks, first, last)
    strips = svg.strips(rows, first, last, label=f"steps {first} to {last} of {count(len(history.ranks), 'rank')}", updates=updates)
    template = _TEMPLATES.get_template("report.html")
    return template.render(
        name=history.name,
        record=history.record,
        strips=Markup(strips) if rows else None,  # noqa: S704 - svg.py escapes
        charts=_charts(history, updates),
        ranks=rank_figures(history)[:_MAX_ROWS],
        attempts=len(history.attempts),
        has_memory=any(track.peak_bytes for track in history.tracks),
        num_ranks=len(history.ranks),
        gpus=gpu_figures(history),
        incidents=[
            (found.get("id"), clock(found.get("time")), found.get("severity"), found.get("kind"), found.get("summary"))
            for found in history.incidents
        ],
        version=__version__,
        short=number,
        **parts,
    )


def _rows(history: JobHistory, first: int, last: int) -> list[tuple[str, str]]:
    """A strip a rank; of more than fit, neighbours share one, and the gravest mark of them shows."""
    several = len(history.attempts) > 1
    cells = [cells_of(track, first, last, history.incidents, _CELLS) for track in history.tracks]
    size = -(-len(cells) // _MAX_ROWS) or 1
    rows = []
    for start in range(0, len(cells), size):
        group = history.tracks[start : start + size]
        ranks = f"rank {group[0].rank}" if len(group) == 1 else f"{group[0].rank} to {group[-1].rank}"
        merged = "".join(max(column, key=MARKS.index) for column in zip(*cells[start : start + size], strict=True))
        rows.append((ranks + (f", attempt {group[0].attempt}" if several else ""), merged))
    return rows


def _charts(history: JobHistory, updates: svg.Updates) -> list[tuple[str, Markup]]:
    marks = sorted({found["step"] for found in history.incidents if found.get("step") is not None})[:20]
    curve = partial(svg.curve, marks=marks, updates=updates)
    drawn = [
        ("Loss", curve(values_by_step(history, "loss"), label="loss", unit="")),
        (
            "Step time, on a logarithmic scale",
            curve(values_by_step(history, "duration_ns", 1e6), label="step time", unit="ms", logarithmic=True),
        ),
        ("Gradient norm", curve(values_by_step(history, "grad_norm"), label="gradient norm", unit="")),
        ("Peak memory of a rank", curve(values_by_step(history, "peak_bytes", 2**20), label="peak memory", unit="MiB")),
    ]
    return [(title, Markup(text)) for title, text in drawn if text]  # noqa: S704 - svg.py escapes


def _bound(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        spoken(str(entry.get("key") or "")),
        "" if entry.get("expression") == spoken(str(entry.get("key") or "")) else str(entry.get("expression") or ""),
        must_be(entry),
        *(str(entry.get(name) or "") for name in ("op", "module", "source", "learned_from")),
    )
