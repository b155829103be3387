"""What a usual step costs, in the one measure that no other load on the machine moves."""

from __future__ import annotations

from pathlib import Path

from listening import listen_to

MOST_CALLS = 160  # between the operators of a model the caches are cold, and a call of Python costs about a microsecond there


def test_a_usual_step_calls_few_functions_of_python(tmp_path: Path) -> None:
    heard = listen_to(tmp_path, "calls_a_step.py", policy="stop")
    assert len(heard.steps) == 60
    assert 50 < heard.printed <= MOST_CALLS, heard.complaints
