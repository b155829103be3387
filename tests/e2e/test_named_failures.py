"""Named failures of real models on two ranks: what a person is told of them, and that no update was made of the bad batch.

The same in one process, with more of them: tests/agent/contract/test_named.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import Ended, launch, script, torchrun, watchdog

from torch_watchdog.phrases import who

pytestmark = pytest.mark.e2e

STEPS, FIRST = 12, 5


def trained(tmp_path: Path, policy: str, model: str, *faults: str, ragged: bool = False, form: str = "tensor") -> Ended:
    """The faults meet rank 1 in one step after the other."""
    planned = [
        *(["--ragged"] if ragged else []),
        "--form",
        form,
        "--fault",
        *(f"{fault}@{FIRST + number}" for number, fault in enumerate(faults)),
    ]
    return launch(tmp_path, [*watchdog("--policy", policy, "--job", model), *torchrun(*script("named.py", model, *planned))])


def told(incident: dict[str, Any]) -> tuple[Any, ...]:
    batch, bound = incident["batch"], incident["bound"]
    return incident["step"], batch["key"], batch["element"], batch["value"], bound["low"], bound["high"], bound["op"]


def sample(step: int) -> int:
    """Row 1 of rank 1's batch."""
    return (step * 2 + 1) * 2 + 1


def test_bert_with_a_label_of_num_labels_stops_both_ranks_before_the_same_step(tmp_path: Path) -> None:
    ended = trained(tmp_path, "stop", "bert", "label")
    assert ended.code == 65, ended.err
    (incident,) = ended.incidents
    assert told(incident) == (FIRST, "labels", [1], 3, 0, 2, "cross_entropy")
    assert (incident["batch"]["sample"]["dataset_index"], incident["bound"]["ignored"]) == (sample(FIRST), [-100])
    assert "num_labels" in incident["cause"]
    action = incident["action"]
    assert (action["prevented"], sorted(action["ranks_stopped"]), action["checkpoint"]["committed"]) == (True, [0, 1], True)
    assert len(ended.lines("trained in step")) == 2 * FIRST


def test_bart_goes_on_without_a_target_past_the_vocabulary_and_without_ignored_labels_in_the_decoder(tmp_path: Path) -> None:
    ended = trained(tmp_path, "skip", "bart", "target", "ignored", "shifted")
    assert ended.code == 0, ended.err
    module = "model.decoder.embed_tokens"
    assert [told(one) for one in ended.incidents] == [
        (5, "labels", [1, 3], 64, 0, 63, "cross_entropy"),
        (6, "decoder_input_ids", [1, 4], -100, 0, 63, "embedding"),
        (7, "decoder_input_ids", [0, 8], -100, 0, 63, "embedding"),
    ]
    assert [one["bound"]["module"] for one in ended.incidents] == [None, module, module]
    assert "shifted before its -100 was replaced" in ended.incidents[2]["cause"]
    assert len(ended.lines("trained in step")) == 2 * STEPS


def test_bart_with_a_source_longer_than_its_positions_names_the_first_token_too_many_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    ended = trained(tmp_path, "stop", "bart", "long")
    assert ended.code == 65, ended.err
    (incident,) = ended.incidents
    assert told(incident) == (FIRST, "input_ids", [1, 32], None, 0, 33, "embedding")
    assert (incident["batch"]["derived"]["value"], incident["batch"]["sample"]["dataset_index"]) == (34, sample(FIRST))
    assert "max_length=32" in incident["fix"]
    assert (incident["action"]["prevented"], incident["action"]["checkpoint"]["updates_applied"]) == (True, FIRST)


@pytest.mark.slow
def test_bart_whose_sources_vary_in_length_goes_on_without_one_that_is_too_long(tmp_path: Path) -> None:
    """Then it is known before the step that positions go by the length, and a shorter batch stands in."""
    ended = trained(tmp_path, "skip", "bart", "long", ragged=True)
    assert ended.code == 0, ended.err
    (incident,) = ended.incidents
    assert (incident["step"], incident["status"]) == (FIRST, "resolved")
    assert len(ended.lines("trained in step")) == 2 * STEPS


def test_layoutlmv3_goes_on_without_boxes_of_another_scale_clips_swapped_corners_and_warns_of_a_short_mask(tmp_path: Path) -> None:
    ended = trained(tmp_path, "skip", "layoutlmv3", "above", "negative", "swapped", "mask")
    assert ended.code == 0, ended.err
    above, negative, mask = ended.incidents
    assert told(above) == (5, "bbox", [1, 5, 2], 1040, 0, 1023, "embedding")
    assert told(negative) == (6, "bbox", [1, 5, 0], -3, 0, 1023, "embedding")
    assert (mask["step"], mask["kind"], mask["severity"], mask["batch"]["key"]) == (8, "batch.shape", "warning", "attention_mask")
    assert "attention_mask (2, 8) does not fit input_ids (2, 10)" in mask["summary"]
    assert len(ended.lines("trained in step")) == 2 * STEPS


@pytest.mark.parametrize("form", ["array", pytest.param("int32", marks=pytest.mark.slow), pytest.param("list", marks=pytest.mark.slow)])
def test_bert_of_whose_batches_the_loop_makes_tensors_goes_on_without_a_bad_id_and_a_bad_label(tmp_path: Path, form: str) -> None:
    ended = trained(tmp_path, "skip", "bert", "id", "label", form=form)
    assert ended.code == 0, ended.err
    bad_id, label = ended.incidents
    assert told(bad_id) == (5, "input_ids", [1, 4], 64, 0, 63, "embedding")
    assert told(label) == (6, "labels", [1], 3, 0, 2, "cross_entropy")
    assert [one["batch"]["sample"]["dataset_index"] for one in (bad_id, label)] == [sample(5), sample(6)]
    assert len(ended.lines("trained in step")) == 2 * STEPS


@pytest.mark.parametrize(("model", "key"), [("bert", "input_ids"), pytest.param("layoutlmv3", "bbox", marks=pytest.mark.slow)])
def test_one_array_where_always_was_a_tensor_is_left_out_and_replay_shows_what_it_would_have_done(
    tmp_path: Path, model: str, key: str
) -> None:
    ended = trained(tmp_path, "skip", model, "numpy")
    assert ended.code == 0, ended.err
    (incident,) = ended.incidents
    assert (incident["step"], incident["kind"], incident["batch"]["key"], incident["origin"]["rank"]) == (FIRST, "batch.dtype", key, 1)
    assert f"{key} came as a NumPy array; embedding needs a tensor" in incident["summary"]
    assert f"{sample(FIRST) - 2}, {sample(FIRST)}" in incident["cause"]
    assert len(ended.lines("trained in step")) == 2 * STEPS
    replayed = launch(tmp_path, [*watchdog("replay"), str(ended.run_dir / incident["evidence"]["bundle"])])
    assert replayed.code == 1 and "TypeError" in replayed.err, replayed.err
    assert f"  who    rank 0, step 0 of the replay; the batch is of {who(incident)}\n" in replayed.err, replayed.err


@pytest.mark.parametrize(
    ("model", "fault", "kind", "key", "words"),
    [
        pytest.param("layoutlmv3", "float", "batch.dtype", "bbox", ("float32", "embedding", ".long()"), marks=pytest.mark.slow),
        ("layoutlmv3", "numpy", "batch.dtype", "bbox", ("NumPy array", "embedding", "as_tensor")),
        pytest.param("losses", "dtype", "batch.dtype", "labels", ("float32", "cross_entropy", ".long()"), marks=pytest.mark.slow),
        ("losses", "shape", "batch.shape", "chance", ("(2,)", "binary_cross_entropy", "(2, 1)")),
    ],
)
def test_a_tensor_of_another_kind_is_named_and_the_last_good_state_is_saved(
    tmp_path: Path, model: str, fault: str, kind: str, key: str, words: tuple[str, ...]
) -> None:
    ended = trained(tmp_path, "stop", model, fault)
    assert ended.code == 65, ended.err
    (incident,) = ended.incidents
    assert (incident["kind"], incident["batch"]["key"], incident["origin"]["rank"]) == (kind, key, 1)
    assert [word for word in words if word not in f"{incident['summary']} {incident['fix']}"] == []
    assert incident["action"]["checkpoint"]["updates_applied"] == FIRST


def test_losses_go_on_without_a_bad_class_chance_index_or_device_and_warn_of_a_row_against_a_column(tmp_path: Path) -> None:
    ended = trained(tmp_path, "skip", "losses", "class", "chance", "nan", "device", "column")
    assert ended.code == 0, ended.err
    bad_class, chance, index, device, column = ended.incidents
    assert told(bad_class) == (5, "labels", [1], 5, 0, 4, "cross_entropy")
    assert (bad_class["kind"], chance["kind"]) == ("batch.index_out_of_range", "probability.out_of_range")
    assert told(chance) == (6, "chance", [1, 0], 255.0, 0, 1, "binary_cross_entropy")
    assert told(index)[:3] == (7, "age", [1])
    assert (index["bound"]["high"], index["bound"]["op"], index["batch"]["derived"]["expression"]) == (49, "embedding", "age * 10")
    assert (device["kind"], device["batch"]["key"], device["batch"]["device"]) == ("batch.device", "labels", "meta")
    assert (column["severity"], column["batch"]["key"]) == ("warning", "price")
    assert "price (2, 1) against an output (2,): mse_loss compares all rows with all others, as (2, 2)" in column["summary"]
    assert len(ended.lines("trained in step")) == 2 * STEPS
