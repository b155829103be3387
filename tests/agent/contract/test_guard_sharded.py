"""Tables that lie in parts on several ranks: an id of another rank's part is legal, and the limit is that of the whole table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from guard_loop import Loop
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812
from torch.testing._internal.distributed.fake_pg import FakeStore

try:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
except ImportError:  # torch 2.4
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed._tensor import Replicate

WORDS, PART = 24, 12


class Shard(nn.Module):
    """Megatron's VocabParallelEmbedding: ids of other ranks are masked, looked up at 0, and their rows set to 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.num_embeddings, self.first, self.end = WORDS, rank * PART, (rank + 1) * PART
        self.weight = nn.Parameter(torch.randn(PART, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < self.first) | (ids >= self.end)
        own = ids.clone() - self.first
        own[elsewhere] = 0
        made = F.embedding(own, self.weight)
        made[elsewhere, :] = 0.0
        return made


class TwoShards(nn.Module):
    """Both parts in one process, and a cross entropy over parallel logits."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Shard(0), Shard(1)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = sum(part(ids) for part in self.parts)
        picked = torch.zeros(labels.shape)
        for part in self.parts:
            logits = hidden @ part.weight.t()
            elsewhere = (labels < part.first) | (labels >= part.end)
            own = (labels - part.first).masked_fill(elsewhere, 0)
            picked = picked + logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        return -picked.mean()


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    model(batch["ids"], batch["labels"]).backward()


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.randint(0, WORDS, (3, 4 + n % 3)) for name in ("ids", "labels")} for n in range(count)]


@pytest.mark.parametrize("only", [None, 0, 1])
def test_an_id_of_another_ranks_part_is_never_an_alarm(only: int | None) -> None:
    torch.manual_seed(0)
    loop = Loop(TwoShards(), step)
    data = batches(30)
    if only is not None:  # the first batches hold ids of one part alone
        for batch in data[:10]:
            batch["ids"] = batch["ids"] % PART + only * PART
    seen = loop.train(data)
    assert [one.violation for one in seen if one.violation] == []
    assert (loop.said, sum(one.checked.needs_trace for one in seen[15:])) == ([], 0)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def test_a_table_of_dtensors_has_the_rows_of_all_its_parts(two_ranks: None) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(Model(), mesh, {"table": RowwiseParallel(input_layouts=Replicate())})
    assert model.table.weight.to_local().shape[0] == PART
    loop = Loop(model, lambda model, batch: model(batch["ids"]).sum().backward())
    seen = loop.train([{"ids": torch.randint(0, WORDS, (3, 4 + n % 3))} for n in range(12)])
    assert ([one.violation for one in seen if one.violation], [one.raised for one in seen if one.raised], loop.said) == ([], [], [])
    assert not seen[-1].checked.needs_trace
    (row,) = loop.guard.contract()["guarded"]
    assert (row["key"], row["bound"]["high"]) == ("ids", WORDS - 1)
    found = loop.step({"ids": torch.tensor([[1, WORDS]])}).violation
    assert found is not None
    assert (found.batch.element, found.batch.value, found.bound.module, found.bound.high) == ((0, 1), WORDS, "table", WORDS - 1)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Model(), nn.Linear(4, 5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.inner(ids).mean(1)), labels)


def flat(*, original: bool) -> nn.Module:
    made: nn.Module = FullyShardedDataParallel(Head(), use_orig_params=original, device_id=torch.device("cpu"))
    return made


def sharded() -> nn.Module:
    model = Head()
    fully_shard(model.inner, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


@pytest.mark.parametrize(
    "make", [lambda: flat(original=True), lambda: flat(original=False), sharded], ids=["fsdp1", "fsdp1, flat", "fsdp2"]
)
def test_a_table_that_is_gathered_for_its_module_alone_has_its_rows_at_rest_too(two_ranks: None, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    loop = Loop(make(), step)

    def draw(length: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.randint(0, WORDS, (3, length)), "labels": torch.randint(0, 5, (3,))}

    seen = loop.train([draw(4 + n % 3) for n in range(12)])
    assert ([one.violation for one in seen if one.violation], [one.raised for one in seen if one.raised], loop.said) == ([], [], [])
    assert not seen[-1].checked.needs_trace
    for key, place, value in (("ids", (1, 2), WORDS), ("labels", (2,), 5)):
        bad = draw(4)
        bad[key][place] = value
        found = loop.step(bad).checked.violation
        assert found is not None and found.bound is not None
        assert (found.batch.key, found.batch.element, found.bound.high) == (key, place, value - 1)
