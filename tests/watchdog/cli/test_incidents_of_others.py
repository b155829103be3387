"""`watchdog incidents` without a name, where the newest job is not the one that failed."""

from __future__ import annotations

import pytest
from cli_runs import Runs


@pytest.mark.usefixtures("ended_job")
def test_where_the_newest_job_has_no_incident_an_earlier_one_that_has_is_hinted_at(runs: Runs) -> None:
    runs.add_job("train-2", started="2026-02-01T00:00:00.000Z", exit_code=0)
    unnamed, named = runs("incidents"), runs("incidents", "train-2")
    assert unnamed.stdout.startswith("job train-2: no incident, and it is the newest; an earlier job has some: `watchdog jobs` "), unnamed
    assert named.stdout.startswith("job train-2: no incident\n"), named


def test_no_other_job_is_spoken_of_where_none_has_an_incident(runs: Runs) -> None:
    runs.add_job("train-1", exit_code=0)
    assert runs("incidents").stdout.startswith("job train-1: no incident\n")
