"""Device-side assertions: the line that the runtime prints, its meaning, and the element where the kernel's formula is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_watchdog.rules.assertions import Catalogue, kernel_name

KNOWLEDGE = Path(__file__).resolve().parents[3] / "watchdog" / "torch_watchdog" / "rules" / "knowledge" / "kernel_asserts.tsv"
KNOWN = Catalogue.from_text(KNOWLEDGE.read_text())


def line(file: str, kernel: str, block: str, thread: str, text: str) -> str:
    return f"/pytorch/aten/src/ATen/native/cuda/{file}:16: {kernel}: block: [{block}], thread: [{thread}] Assertion `{text}` failed."


GATHER = (
    "IndexKernelUtils.cu",
    "vectorized_gather_kernel",
    'ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of bounds"',
)
LABEL = ("Loss.cu", "nll_loss_forward_reduce_cuda_kernel_2d", "t >= 0 && t < n_classes")


@pytest.mark.parametrize(
    ("kind", "block", "thread", "position", "exact"),
    [
        (GATHER, "15,0,0", "0,0,0", 15, True),  # ids[2,3] of [4,6], as on an H100
        (GATHER, "10540,0,0", "96,0,0", 10540, True),  # ids[20,300] of [64,512]
        (LABEL, "0,0,0", "5,0,0", 5, False),  # target[5] of 8
    ],
)
def test_the_element_follows_from_block_and_thread(kind: tuple[str, str, str], block: str, thread: str, position: int, exact: bool) -> None:
    file, kernel, text = kind
    found = KNOWN.read("before\n" + line(file, kernel, block, thread, text) + "\nafter")
    assert found is not None
    assert (found.kernel, found.position, found.exact) == (kernel, position, exact)
    assert found.op and found.meaning and found.fix


def test_the_first_of_many_lines_counts_and_all_are_counted() -> None:
    file, kernel, text = GATHER
    log = "\n".join(line(file, kernel, f"{block},0,0", "0,0,0", text) for block in (7, 9, 11))
    found = KNOWN.read(log)
    assert found is not None
    assert (found.position, found.num_lines) == (7, 3)


def test_an_unknown_kernel_is_told_as_it_stands() -> None:
    found = Catalogue().read(line("Mine.cu", "void ns::mine<float, 4>(float*, int)", "1,0,0", "2,0,0", "x < y"))
    assert found is not None
    assert (found.kernel, found.text, found.position) == ("mine", "x < y", None)


def test_other_lines_are_no_assertion() -> None:
    assert KNOWN.read("AssertionError: Assertion `x` failed.\nfile.cu:1: nothing") is None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("vectorized_gather_kernel", "vectorized_gather_kernel"),
        ("void at::native::(anonymous namespace)::gather<long, Index<int, 4>>(T *, int) [with T = long]", "gather"),
        ("at::native::gpu_kernel(...)::[lambda(int)]::operator()(int) const", "operator()"),
    ],
)
def test_the_kernels_name_without_its_types(function: str, name: str) -> None:
    assert kernel_name(function) == name
