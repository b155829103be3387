"""The states of every random number generator that a training draws from by itself.

Owns capturing and putting back Python's `random`, numpy's global generator, torch's CPU generator and each CUDA generator. Never
initialises CUDA, never synchronises with a device, never imports numpy or torch that the user has not imported. Of the generators that user
code holds (`numpy.random.default_rng()`, `torch.Generator()`) only those are known that a caller names: a loader's `own`.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

# Both twisters have 624 words and a position: numpy's behind the words, Python's before them.
_MT19937_BYTES = 625 * 4

# A capture is made in every step, when the training has just used all caches: what counts is how little code and memory it touches. So the words are
# copied from where the libraries keep them, only once they have moved on, and spelled out only where they are needed.
_last_numpy: tuple[bytes, bytes, dict[str, Any]] | None = None  # the words, the cached Gaussian, and both spelled out
_numpy_gauss: tuple[Any, memoryview | None] = (None, None)  # of which owner
_GAUSS_BYTES = 16
_numpy_words: tuple[Any, _Twister | None] = (None, None)  # of which bit generator


class _Twister:
    """The words of one generator, in place."""

    __slots__ = ("_bytes", "_last", "_words")

    def __init__(self, address: int) -> None:
        self._bytes = memoryview((ctypes.c_char * _MT19937_BYTES).from_address(address)).cast("B")
        self._words = self._bytes.cast("I")
        self._last: tuple[tuple[int, ...], bytes] = (), b""

    def copied(self) -> bytes:
        """The same object where nothing was drawn since the last copy: any draw moves the position (the first word or the last), or turns all words."""
        words, last = self._words, self._last
        sign = words[0], words[1], words[200], words[400], words[624]
        if sign != last[0]:
            last = self._last = sign, bytes(self._bytes)
        return last[1]


def _python_words() -> _Twister | None:
    """Where CPython keeps the words of `random`: behind the object's header. None where that is not what `getstate` spells out."""
    try:
        words = _Twister(id(_python) + object.__basicsize__)
        return words if PythonState(words.copied(), None).spelled()[1] == _python.getstate()[1] else None
    except (TypeError, ValueError, AttributeError):
        return None


class PythonState(NamedTuple):
    """Of `random`: the raw words, or what `getstate` gives; and the second Gaussian where one is cached."""

    words: bytes | tuple[Any, ...]
    gauss: float | None

    def spelled(self) -> tuple[Any, ...]:
        """As `random.setstate` takes it."""
        if isinstance(self.words, tuple):
            return self.words
        position, *words = _PYTHON_WORDS.unpack(self.words)
        return 3, (*words, position), self.gauss


_PYTHON_WORDS = struct.Struct("=i624I")
_python: Any = random.getstate.__self__  # type: ignore[attr-defined]
_python_in_place = _python_words() if sys.implementation.name == "cpython" else None


def _python_state() -> PythonState:
    if _python_in_place is None:
        return PythonState(random.getstate(), None)
    return PythonState(_python_in_place.copied(), _python.gauss_next)


class RngState(NamedTuple):
    """One moment of all generators. `numpy` and `torch_cpu` are None where the library was not there; `cuda` is empty without CUDA; `own` are a loader's."""

    python: PythonState
    numpy: Mapping[str, Any] | None = None
    torch_cpu: Any = None
    cuda: tuple[Any, ...] = ()
    own: tuple[Any, ...] = ()

    @classmethod
    def capture(cls, own: Sequence[Any] = ()) -> Self:
        """Take the present state. Numpy's is spelled out, in 35 us, only where its generator was used since the last call."""
        torch = sys.modules.get("torch")
        if torch is None:
            return cls(_python_state(), _numpy_state())
        cuda = _cuda_states(torch.cuda.default_generators) if torch.cuda.is_initialized() else ()
        return tuple.__new__(
            cls, (_python_state(), _numpy_state(), torch.default_generator.get_state(), cuda, tuple([one.get_state() for one in own]))
        )

    def is_same(self, other: RngState) -> bool:
        """Whether nothing was drawn between the two, a loader's own generators aside."""
        if self.python != other.python or self.numpy is not other.numpy or len(self.cuda) != len(other.cuda):
            return False
        states = zip((self.torch_cpu, *self.cuda), (other.torch_cpu, *other.cuda), strict=True)
        return all(one is two or (one is not None and two is not None and one.equal(two)) for one, two in states)

    def restore(self, own: Sequence[Any] = ()) -> None:
        """Put every generator back to this state, `own` where as many were captured. CUDA states wait for CUDA's own initialisation where that is to come."""
        random.setstate(self.python.spelled())
        if self.numpy is not None:
            _set_numpy_state(self.numpy)
        if self.torch_cpu is not None:
            import torch

            torch.default_generator.set_state(self.torch_cpu)
            for index, state in enumerate(self.cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, index)
        for generator, state in zip(own, self.own, strict=True) if len(own) == len(self.own) else ():
            generator.set_state(state)

    def to_parts(self, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split into (JSON-able dict, tensors by name), the names beginning with `prefix`."""
        import torch

        version, words, gauss = self.python.spelled()
        tensors: dict[str, Any] = {f"{prefix}.python": torch.tensor(words, dtype=torch.int64, device="cpu")}
        plain: dict[str, Any] = {
            "python": {"version": version, "gauss": gauss},
            "numpy": None,
            "cuda": len(self.cuda),
            "own": len(self.own),
        }
        if self.numpy is not None:
            plain["numpy"] = _without_arrays(self.numpy, f"{prefix}.numpy", tensors)
        if self.torch_cpu is not None:
            tensors[f"{prefix}.torch"] = self.torch_cpu
        tensors |= {f"{prefix}.cuda.{index}": state for index, state in enumerate(self.cuda)}
        tensors |= {f"{prefix}.own.{index}": state for index, state in enumerate(self.own)}
        return plain, tensors

    @classmethod
    def from_parts(cls, prefix: str, plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> Self:
        """The inverse of `to_parts`."""
        python = plain["python"]
        words = tuple(tensors[f"{prefix}.python"].tolist())
        numpy = plain["numpy"]
        return cls(
            python=PythonState((python["version"], words, python["gauss"]), None),
            numpy=None if numpy is None else _with_arrays(numpy, tensors),
            torch_cpu=tensors.get(f"{prefix}.torch"),
            cuda=tuple(tensors[f"{prefix}.cuda.{index}"] for index in range(plain["cuda"])),
            own=tuple(tensors[f"{prefix}.own.{index}"] for index in range(plain.get("own", 0))),  # 0.1 did not keep them at first
        )


_last_cuda: tuple[tuple[tuple[int, int], ...], tuple[Any, ...]] = (), ()  # (seed, offset) of each, and its state


def _cuda_states(generators: Sequence[Any]) -> tuple[Any, ...]:
    """A CUDA generator's state is its seed and offset, kept on the host: reading it neither waits nor touches the device. There is one for each GPU that the
    process sees, and those that drew nothing since the last call are most of them: their states are the same objects."""
    global _last_cuda
    signs = tuple((generator.initial_seed(), generator.get_offset()) for generator in generators)
    before, states = _last_cuda
    if signs != before:
        same = len(signs) == len(before)
        states = tuple(
            states[number] if same and sign == before[number] else generator.get_state()
            for number, (sign, generator) in enumerate(zip(signs, generators, strict=True))
        )
        _last_cuda = signs, states
    return states


def _numpy_state() -> dict[str, Any] | None:
    global _last_numpy
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    raw, gauss = _raw_mt19937(numpy_random), _raw_gauss(numpy_random)
    if raw is not None and gauss is not None and _last_numpy is not None and _last_numpy[0] is raw and _last_numpy[1] == gauss:
        return _last_numpy[2]
    state: dict[str, Any] = numpy_random.get_state(legacy=False)
    _last_numpy = None if raw is None or gauss is None else (raw, gauss, state)
    return state


def _raw_gauss(numpy_random: Any) -> bytes | None:
    """The second Gaussian and whether one is cached: spent, or put back by `set_state`, without a trace in the words. None: where it lies is not known."""
    global _numpy_gauss
    owner = getattr(numpy_random.get_state, "__self__", None)  # a script may have put its own in that place
    if owner is None:
        return None
    if owner is not _numpy_gauss[0]:
        offset = _gauss_offset(type(owner))
        _numpy_gauss = (owner, None if offset is None else memoryview((ctypes.c_char * _GAUSS_BYTES).from_address(id(owner) + offset)))
    place = _numpy_gauss[1]
    return None if place is None else bytes(place)


def _gauss_offset(kind: Any) -> int | None:
    """Where in numpy's object the flag lies, with the Gaussian eight bytes behind it: looked for in one of our own, by what its states spell out."""
    probe = kind(1)
    memory = (ctypes.c_char * kind.__basicsize__).from_address(id(probe))
    probe.standard_normal()
    offset = bytes(memory).find(struct.pack("=ixxxxd", 1, probe.get_state()[4]))
    if offset < 0:
        return None
    for state in (("MT19937", probe.get_state()[1], 5, 0, 0.0), ("MT19937", probe.get_state()[1], 5, 1, -0.625)):
        probe.set_state(state)
        flag, gauss = struct.unpack_from("=ixxxxd", bytes(memory), offset)
        if (flag, gauss) != state[3:]:
            return None
    return offset


def _raw_mt19937(numpy_random: Any) -> bytes | None:
    global _numpy_words
    bit_generator = numpy_random.get_bit_generator()
    if bit_generator is not _numpy_words[0]:
        is_known = type(bit_generator).__name__ == "MT19937"
        _numpy_words = (bit_generator, _Twister(bit_generator.ctypes.state_address) if is_known else None)
    words = _numpy_words[1]
    return None if words is None else words.copied()


def _set_numpy_state(state: Mapping[str, Any]) -> None:
    global _last_numpy
    import numpy as np

    _last_numpy = None
    np.random.set_state(dict(state))


def _without_arrays(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    import numpy as np
    import torch

    if isinstance(value, Mapping):
        return {key: _without_arrays(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(np.frombuffer(value.tobytes(), dtype=np.uint8).copy())
        return {"array": name, "dtype": str(value.dtype), "shape": list(value.shape)}
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(value: Any, tensors: Mapping[str, Any]) -> Any:
    import numpy as np

    if not isinstance(value, Mapping):
        return value
    if "array" in value:
        raw = tensors[value["array"]].numpy().tobytes()
        return np.frombuffer(raw, dtype=value["dtype"]).reshape(value["shape"]).copy()
    return {key: _with_arrays(item, tensors) for key, item in value.items()}
