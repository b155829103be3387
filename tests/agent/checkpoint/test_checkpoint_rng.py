"""Generators and the position in the data: taken cheaply, put back exactly, written without pickle."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState, _cuda_states


def draw() -> list[float]:
    gauss = [random.gauss(0, 1), float(np.random.randn())]  # both keep a second value for the next call
    return [*gauss, random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.randn(()))]


def test_restoring_repeats_every_generator() -> None:
    draw()
    state = RngState.capture()
    first = draw()
    draw()
    state.restore()
    assert draw() == first


def test_a_generator_that_was_not_used_is_not_copied_anew_and_any_use_is_seen() -> None:
    for draw_all, seed in (
        (lambda: [random.getrandbits(32) for _ in range(624)], random.seed),
        (lambda: np.random.bytes(624 * 4), np.random.seed),
    ):
        seed(5)
        first, again = RngState.capture(), RngState.capture()
        assert first.python.words is again.python.words and first.numpy is again.numpy
        draw_all()  # a whole turn of the twister: the position is where it was
        turned = RngState.capture()
        first.restore()
        once = (random.random(), np.random.rand())
        turned.restore()
        assert (random.random(), np.random.rand()) != once
        seed(6)
        other = RngState.capture()
        seed(5)
        other.restore()
        assert (random.random(), np.random.rand()) != once


def test_numpys_second_gaussian_is_not_taken_for_an_unchanged_state() -> None:
    np.random.seed(1)
    np.random.randn()
    with_second = RngState.capture()
    second = np.random.randn()  # comes from the cache: the raw words of the generator stay as they are
    after = RngState.capture()
    third = np.random.randn()
    with_second.restore()
    assert np.random.randn() == second
    after.restore()
    assert np.random.randn() == third


def test_a_second_gaussian_that_a_script_puts_back_is_seen() -> None:
    np.random.seed(0)
    np.random.randn()
    before = np.random.get_state()
    first = np.random.randn()
    RngState.capture()
    np.random.set_state(before)  # the words are where they were: only the Gaussian is there again
    with_second = RngState.capture()
    assert with_second.numpy["has_gauss"] == 1 and with_second.numpy is RngState.capture().numpy
    assert np.random.randn() == first
    with_second.restore()
    assert np.random.randn() == first


def test_another_bit_generator_of_numpy_is_carried_too() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        plain, tensors = RngState.capture().to_parts("here")
        first = np.random.rand()
        RngState.from_parts("here", json.loads(json.dumps(plain)), tensors).restore()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(before)


def test_a_position_survives_json_and_tensors() -> None:
    at_iter = RngState.capture()
    draw()
    position = LoaderPosition(epoch=2, batches=7, rng_at_iter=at_iter, rng=RngState.capture())
    plain, tensors = position.to_parts()
    first = draw()
    back = LoaderPosition.from_parts(json.loads(json.dumps(plain)), tensors)
    assert (back.epoch, back.batches) == (2, 7)
    back.rng.restore()
    assert draw() == first
    position.rng_at_iter.restore()
    expected = draw()
    back.rng_at_iter.restore()
    assert draw() == expected


def test_capturing_imports_nothing_and_the_package_needs_no_torch() -> None:
    script = """
import sys
import torch_watchdog_agent.checkpoint as checkpoint
from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState, _cuda_states
state = RngState.capture()
state.restore()
assert state.numpy is None and state.torch_cpu is None and checkpoint.__all__
assert not {"torch", "numpy"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


class OfADevice:
    """What a CUDA generator says of itself, where there is none."""

    def __init__(self) -> None:
        self.offset, self.asked = 0, 0

    def initial_seed(self) -> int:
        return 7

    def get_offset(self) -> int:
        return self.offset

    def get_state(self) -> tuple[int, int]:
        self.asked += 1
        return 7, self.offset


def test_only_a_device_whose_generator_drew_is_asked_for_its_state() -> None:
    first, second = generators = [OfADevice(), OfADevice()]
    assert _cuda_states(generators) == _cuda_states(generators) == ((7, 0), (7, 0))
    second.offset = 4
    assert _cuda_states(generators) == ((7, 0), (7, 4))
    assert (first.asked, second.asked) == (1, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_devices_generator_is_put_back_after_draws_and_after_a_seed() -> None:
    torch.cuda.manual_seed_all(3)
    torch.rand(8, device="cuda")
    state, again = RngState.capture(), RngState.capture()
    assert state.cuda[0] is again.cuda[0]
    drawn = torch.rand(8, device="cuda").tolist()
    moved = RngState.capture()
    torch.cuda.manual_seed_all(4)
    seeded = RngState.capture()
    assert len({tuple(one.cuda[0].tolist()) for one in (state, moved, seeded)}) == 3
    state.restore()
    assert torch.rand(8, device="cuda").tolist() == drawn
