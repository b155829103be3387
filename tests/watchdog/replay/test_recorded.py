"""Whose batch a bundle holds."""

from __future__ import annotations

import json
from pathlib import Path

from torch_watchdog.replay.recorded import batch_of


def test_of_several_incidents_the_one_that_knows_the_sample_says_whose_batch_it_was(tmp_path: Path) -> None:
    bundle = tmp_path / "bundles" / "0-1.safetensors"
    (tmp_path / "job.json").write_text("{}")
    assert batch_of(bundle) == ""
    told = [
        {"origin": {"rank": 1}, "step": 5, "evidence": {"bundle": "bundles/0-1.safetensors"}},
        {"origin": {"rank": 1}, "step": 5, "batch": {"sample": {"dataset_index": 45}}, "evidence": {"bundle": "bundles/0-1.safetensors"}},
        {"origin": {"rank": 3}, "step": 500, "batch": {"sample": {"dataset_index": 7}}, "evidence": {"bundle": "bundles/0-3.safetensors"}},
        [],
    ]
    for number, incident in enumerate(told):
        (tmp_path / "incidents" / str(number)).mkdir(parents=True)
        (tmp_path / "incidents" / str(number) / "incident.json").write_text(json.dumps(incident))
    assert batch_of(bundle) == "rank 1, step 5, dataset sample 45"
