"""The pure pieces of the guard: naming, sizes, ranges, the hot path, repair, words."""

from __future__ import annotations

import dataclasses
import warnings
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from torch_watchdog_agent.contract.bounds import LiveTable, Range
from torch_watchdog_agent.contract.check import allows, extremes
from torch_watchdog_agent.contract.consumers import CONSUMERS, uses_of
from torch_watchdog_agent.contract.findings import Seen
from torch_watchdog_agent.contract.flatten import leaves_of, replaced, taken_apart
from torch_watchdog_agent.contract.frames import ModuleNames
from torch_watchdog_agent.contract.kinds import copies, counted, ctc_frames_needed, offending, outside
from torch_watchdog_agent.contract.nodes import schema_of
from torch_watchdog_agent.contract.signature import Scalars
from torch_watchdog_agent.contract.sizes import AmbiguousSizeError, Size, fresh, merged, resolved
from torch_watchdog_agent.contract.where import Origin, lengths_of

torch.set_num_threads(1)
aten = torch.ops.aten
Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    tokens: torch.Tensor
    name: str = "a"


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values)


# Naming


@pytest.mark.parametrize(
    ("batch", "paths"),
    [
        ({"input_ids": tensor(1), "labels": tensor(2)}, ["input_ids", "labels"]),
        (UserDict({"input_ids": tensor(1)}), ["input_ids"]),
        ((tensor(1), tensor(2)), ["0", "1"]),
        ([{"input_ids": tensor(1)}, {"targets": tensor(2)}], ["0.input_ids", "1.targets"]),
        (Pair(tensor(1), {"z": tensor(2)}), ["x", "y.z"]),
        (Record(tensor(1)), ["tokens"]),
        (tensor(1), ["batch"]),
        ({"a": {"b": [tensor(1)]}, 3: tensor(2), "text": ["x", "y"], "none": None}, ["a.b.0", "3"]),
        ("no batch", []),
    ],
)
def test_every_tensor_of_a_batch_has_a_dotted_path(batch: object, paths: list[str]) -> None:
    assert list(leaves_of(batch)) == paths


@pytest.mark.parametrize(
    "batch",
    [
        {"a": tensor(1), "n": 3},
        UserDict({"a": tensor(1)}),
        [tensor(1), "x"],
        (tensor(1), tensor(2)),
        Pair(tensor(1), 5),
        Record(tensor(1)),
        {"a": [Pair(tensor(1), Record(tensor(2)))]},
    ],
)
def test_a_replaced_batch_has_the_same_types_and_leaves_the_original_alone(batch: object) -> None:
    leaves = leaves_of(batch)
    copied = replaced(batch, {key: value + 100 for key, value in leaves.items()})
    assert type(copied) is type(batch)
    assert [int(value) for value in leaves_of(copied).values()] == [int(value) + 100 for value in leaves.values()]
    assert all(value is leaves[key] for key, value in leaves_of(batch).items())
    assert taken_apart(copied)[1] == taken_apart(batch)[1]


def test_a_batch_encoding_keeps_its_type() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": tensor(1)})
    copied = replaced(batch, {"input_ids": tensor(2)})
    assert isinstance(copied, transformers.BatchEncoding)
    assert (int(copied["input_ids"]), int(batch["input_ids"])) == (2, 1)


def test_a_scalar_that_differs_all_the_time_tells_batches_apart_no_longer() -> None:
    scalars = Scalars()
    told = [scalars.telling([("task", ("nli", "qa")[n % 2]), ("id", n)]) for n in range(12)]
    assert told[0] == (("task", "nli"), ("id", 0))
    assert told[-1] == (("task", "qa"),)


# Sizes


def test_a_size_is_known_where_all_its_readings_agree() -> None:
    size = fresh(12, {"ids": (4, 12)})
    assert resolved(size, {"ids": (4, 12)}) == 12
    with pytest.raises(AmbiguousSizeError):
        resolved(size, {"ids": (4, 13)})


def test_a_second_trace_leaves_the_readings_that_fit_both() -> None:
    size = merged(fresh(12, {"ids": (4, 12)}), fresh(9, {"ids": (4, 9)}))
    assert resolved(size, {"ids": (7, 30)}) == 30


def test_no_reading_is_left_of_a_size_that_depends_on_data() -> None:
    assert not merged(fresh(5, {"ids": (4, 12)}), fresh(7, {"ids": (4, 12)})).readings


@given(st.lists(st.tuples(st.integers(2, 9), st.integers(2, 40)), min_size=1, max_size=5), st.integers(-3, 3))
def test_the_true_reading_survives_every_trace(shapes: list[tuple[int, int]], offset: int) -> None:
    size: Size | None = None
    for shape in shapes:
        again = fresh(shape[1] + offset, {"ids": shape}) if shape[1] + offset >= 0 else None
        size = again if size is None else merged(size, again) if again is not None else size
    assert size is None or ("size", "ids", 1, offset) in size.readings


# Ranges and the hot path

INTEGERS = st.one_of(st.integers(-200, 300), st.sampled_from([-(2**63), 2**63 - 1, -100, 255, 2**40]))


@settings(max_examples=300)
@example(values=[0, 12], low=0, span=9, ignored=0)  # as many that are ignored as are wrong: padding that is 0
@given(
    values=st.lists(INTEGERS, min_size=1, max_size=30),
    low=st.integers(-50, 5),
    span=st.integers(0, 60),
    ignored=st.sampled_from([None, -100, 255, -1, 0, 3]),
)
def test_the_hot_path_says_what_looking_at_every_element_says(values: list[int], low: int, span: int, ignored: int | None) -> None:
    allowed = Range(low=low, high=low + span, ignored=ignored)
    made = torch.tensor(values)
    expected = not bool(outside(made, allowed).any())
    assert allows(allowed, extremes(made, -100 if ignored is None else ignored)) == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_statistics_are_right_for_every_integer_dtype_and_layout(dtype: torch.dtype) -> None:
    made = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    for view in (made, made.t(), made[:, ::2]):
        seen = extremes(view)
        assert (seen.low, seen.high, seen.negatives) == (0, 1, 0)


def test_ignored_labels_and_negatives_are_counted() -> None:
    stat = extremes(tensor(-100, 3, -1, -100)).stat("labels", tensor(-100, 3, -1, -100))
    assert (stat.key, stat.low, stat.high, stat.negatives, stat.ignored, stat.finite) == ("labels", -100, 3, 3, 2, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_seen_in_every_float_dtype(dtype: torch.dtype, value: float) -> None:
    made = torch.ones(7, 5, dtype=dtype)
    assert extremes(made).finite
    made[3, 2] = value
    assert not extremes(made).finite


def test_a_tensor_without_values_is_not_read() -> None:
    for made in (torch.empty(0, dtype=torch.int64), torch.empty(3, dtype=torch.int64, device="meta")):
        stat = extremes(made).stat("x", made)
        assert np.isnan(stat.low)
        assert stat.finite
        assert allows(Range(low=0, high=1), extremes(made))


def test_a_view_with_its_sign_turned_is_read_with_that_sign() -> None:
    spectrum = torch.complex(torch.zeros(3), torch.tensor([1.0, 2.0, 5.0]))
    turned = spectrum.conj().imag
    assert turned.is_neg()
    assert (extremes(turned).low, extremes(turned).high) == (-5.0, -1.0)


def test_a_tensor_that_holds_no_plain_numbers_is_passed_over_alone() -> None:
    packed = torch.empty(3, dtype=torch.uint8).view(torch.bits8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    assert list(leaves_of({"packed": packed, "quantized": quantized, "ids": torch.tensor([1])})) == ["ids"]


def test_a_range_within_another_counts_its_ignored_value() -> None:
    assert Range(low=0, high=3).within(Range(low=0, high=5))
    assert not Range(low=0, high=3, ignored=-100).within(Range(low=0, high=5))
    assert Range(low=0, high=3, ignored=-100).within(Range(low=0, high=5, ignored=-100))
    assert Range(low=0, high=3, ignored=4).within(Range(low=0, high=5))


# Tables


def test_a_sharded_table_shows_its_whole_length_though_it_has_no_rows() -> None:
    module = nn.Embedding(64, 8)
    table = LiveTable(module.weight, 0, module)
    module.weight.data = torch.empty(0)
    assert (table.rows(), table.changed()) == (64, False)
    module.weight.ds_shape = torch.Size([64, 8])
    assert table.rows() == 64


def test_a_table_that_was_resized_or_rebuilt_has_changed() -> None:
    module = nn.Embedding(64, 8)
    table = LiveTable(module.weight, 0, module)
    module.weight.data = torch.empty(70, 8)
    assert (table.rows(), table.changed()) == (70, True)
    other = nn.Embedding(5, 2)
    gone = LiveTable(other.weight, 0, other)
    del other
    assert gone.changed()


def test_modules_are_named_as_the_user_named_them() -> None:
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    inner = nn.Sequential(nn.Embedding(3, 2), nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)}))
    names = ModuleNames()
    names.learn(Wrapped(inner))
    assert names.path(inner[0]) == "0"
    assert names.path(inner[1]["_orig_mod"]) == "1"
    assert names.path(nn.Linear(1, 1)) is None


# Consumers


def uses(func, *args, **kwargs):
    return uses_of(func, schema_of(func).position, args, kwargs)


def test_each_consumer_states_the_range_of_its_index() -> None:
    index, table = tensor(0, 1), torch.zeros(5, 3)
    cases = [
        (uses(aten.embedding.default, table, index), (0, 5, None, False)),
        (uses(aten.index_select.default, table, 1, index), (0, 3, None, False)),
        (uses(aten.gather.default, table, -1, index[None]), (0, 3, None, False)),
        (uses(aten.index.Tensor, table, [None, index]), (0, 3, None, True)),
        (uses(aten.nll_loss_forward.default, table, index, None, 2, 7), (0, 3, 7, False)),
        (uses(aten.take.default, table, index), (0, 15, None, True)),
        (uses(aten.binary_cross_entropy_with_logits.default, table, index), (0, 0, None, False)),
    ]
    for found, expected in cases:
        use = found[0]
        assert (use.low, use.rows, use.ignored, use.wraps) == expected


def test_a_mean_loss_needs_something_to_learn_and_a_sum_does_not() -> None:
    scores, target = torch.zeros(2, 3), tensor(-100, -100)
    kinds = [[use.kind for use in uses(aten.nll_loss_forward.default, scores, target, None, reduction, -100)] for reduction in (0, 1, 2)]
    assert kinds == [["range"], ["range", "some"], ["range"]]
    assert offending("some", [target], Range(low=0, high=2, ignored=-100), {}) is not None
    assert offending("some", [tensor(-100, 0)], Range(low=0, high=2, ignored=-100), {}) is None


def test_every_overload_of_a_consumer_is_known() -> None:
    names = {str(func) for func in CONSUMERS}
    assert {"aten.scatter_.value", "aten.scatter_.src", "aten.index_put_.default", "aten._ctc_loss.Tensor"} <= names


def test_ctc_needs_a_frame_for_each_label_and_one_between_equal_neighbours() -> None:
    labels = torch.tensor([[1, 1, 2, 2, 3, 3, 4, 4], [5, 6, 7, 1, 2, 3, 3, 3]])
    assert ctc_frames_needed(labels, tensor(8, 6)).tolist() == [12, 6]
    fits = {"endless_is_zero": False}
    assert offending("ctc", [labels, tensor(12, 10), tensor(8, 6)], Range(low=0, high=7), fits) is None
    bad = offending("ctc", [labels, tensor(10, 10), tensor(8, 6)], Range(low=0, high=7), fits)
    assert bad is not None
    assert bad.any(1).tolist() == [True, False]
    assert offending("ctc", [labels, tensor(10, 10), tensor(8, 6)], Range(low=0, high=7), {"endless_is_zero": True}) is None


# Samples


def test_a_flat_row_belongs_to_the_sample_that_batch_idx_names() -> None:
    leaves = {"image": torch.zeros(2, 3), "batch_idx": tensor(0, 0, 1, 1, 1), "cls": tensor(0, 0, 0, 0, 1)}
    origin = Origin(leaves=leaves, indices=[21, 23], worker=1)
    sample = origin.sample("cls", (4,))
    assert sample is not None
    assert (sample.position_in_batch, sample.dataset_index, sample.worker) == (1, 23, 1)


def test_the_real_length_of_a_row_is_read_off_mask_labels_or_padding() -> None:
    ids = torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8]])
    assert lengths_of({"ids": ids}, 2, 4, "ids") == [2, 4]
    assert lengths_of({"ids": ids, "attention_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]])}, 2, 4, "ids") == [1, 3]
    assert lengths_of({"labels": torch.tensor([[1, -100, -100, -100], [1, 2, 3, 4]])}, 2, 4, "labels") == [1, 4]


# Without a trace


def test_only_what_was_never_so_before_is_odd() -> None:
    seen = Seen()

    def look(made: torch.Tensor) -> list[str]:
        leaves, found = {"x": made}, {"x": extremes(made)}
        news = seen.news(leaves, found, {})
        odd = [one.kind for one in seen.oddities(news, leaves, found, {})]
        seen.took(news, leaves, found, {})
        return odd

    assert look(torch.ones(8, 8)) == []
    assert look(torch.ones(8, 9)) == []
    assert look(torch.ones(8, 8, dtype=torch.int64)) == ["batch.dtype"]
    assert look(torch.full((8, 8), float("nan"))) == ["batch.not_finite"]
    assert look(torch.full((8, 8), float("nan"))) == []
    assert look(torch.ones(8, 8, device="meta")) == ["batch.device"]
    for _ in range(10):
        assert look(torch.ones(8, 40)) == []
    assert look(torch.ones(8, 400)) == []
    assert look(torch.ones(8, 4000)) == ["batch.size_outlier"]
    assert look(torch.ones(8, 16000)) == []
    seen.outlier_times = 3.0
    assert look(torch.ones(8, 48000)) == ["batch.size_outlier"]


# Counts


def test_bags_begin_at_0_and_never_run_backwards() -> None:
    fits = Range(low=0, high=0)
    assert offending("starts", [tensor(0, 3, 3, 6)], fits, {}) is None
    assert offending("starts", [tensor(1, 3)], fits, {}).tolist() == [True, False]
    assert offending("starts", [tensor(0, 4, 2, 6)], fits, {}).tolist() == [False, False, True, False]
    assert offending("starts", [torch.empty(0, dtype=torch.long)], fits, {}) is None


def test_a_mask_that_was_expanded_over_features_is_counted_without_being_laid_out() -> None:
    mask = tensor(1, 0, 1)[:, None].bool().expand(3, 8)
    assert (counted("count", mask), copies(mask)) == (16, 8)
    assert counted("count", mask.contiguous()) == 16
    assert counted("count", torch.zeros(2, 0, dtype=torch.bool).expand(3, 2, 0)) == 0
    assert counted("sum", tensor(3, 4)) == 7


def test_a_scatter_takes_more_features_than_cells_and_an_assignment_does_not() -> None:
    mask, room = torch.tensor([True, True, False]), Range(low=0, high=2)  # three rows
    verdicts = {kind: offending(kind, [mask], room, {"exact": exact}) is None for kind, exact in (("count", False), ("agree", False))}
    assert verdicts == {"count": True, "agree": False}
    assert offending("count", [mask], room, {"exact": True}) is not None
    assert offending("count", [mask], Range(low=0, high=0), {"exact": True}) is None  # one row of values goes to every cell
    assert offending("count", [torch.ones(4, dtype=torch.bool)], room, {"exact": False}) is not None
