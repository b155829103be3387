"""Puts the transition table of the stop protocol into proto/README.md, as a diagram and as a table: `python tests/proto/stop_diagram.py` (make diagram)."""

from __future__ import annotations

from pathlib import Path

from torch_watchdog_proto.stop.table import TABLE, mermaid

README = Path(__file__).resolve().parents[2] / "proto" / "README.md"
BEGIN, END = "<!-- made by `make diagram`: begin -->\n", "<!-- made by `make diagram`: end -->\n"


def drawn() -> str:
    rows = "".join(f"| {row.state} | {row.trigger} | {row.next} | {row.deed} | {row.why} |\n" for row in TABLE.values())
    heads = "| in state | at | then | do | because |\n|---|---|---|---|---|\n"
    return f"```mermaid\n{mermaid()}```\n\n{heads}{rows}"


def parts(text: str) -> tuple[str, str, str]:
    """What stands before the drawn part, the drawn part, and what comes after it."""
    before, _, rest = text.partition(BEGIN)
    now, _, after = rest.partition(END)
    return before, now, after


if __name__ == "__main__":
    before, _, after = parts(README.read_text())
    README.write_text(f"{before}{BEGIN}{drawn()}{END}{after}")
