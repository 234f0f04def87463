"""Layers of different kinds in one cache, and a step that waits for nothing.

The kinds are those of 2026 models: wider heads in global layers, more KV heads in windowed ones,
keys that serve as values. No model of this package has them all, so keys and values are fed by
hand and what is read is compared with the list of what was written.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from oracles.cache_kinds import model_of
from oracles.toys import text, toy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvbook.cache import (
    INT8,
    BlockPool,
    BlockTable,
    KVCache,
    LayerKind,
    new_bound_cache,
    new_cache,
    new_paged_cache,
    quantized,
)
from kvbook.generate import stream_cached

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = LayerKind(1, 8, 6, torch.float64)
NARROW = LayerKind(3, 4, 4, torch.float64, window=3, sinks=1)
SHARED = LayerKind(2, 5, 0, torch.float64)  # the keys serve as values
KINDS = [NARROW, WIDE, NARROW, SHARED]


def bound(kinds: Sequence[LayerKind]) -> KVCache:
    pools = [BlockPool(12, 4) for _ in set(kinds)]
    for skipped, pool in enumerate(pools):
        pool.allocate(skipped + 1)  # so that no two groups have one table
    cache = new_bound_cache(kinds, *pools)
    tables = [[BlockTable(pool, pool.allocate(3)) for _ in range(2)] for pool in pools]
    cache.bind(*tables, lengths=[0, 0])
    return cache


CACHES = {
    "contiguous": lambda: new_cache(KINDS, 2, 12),
    "ring": lambda: new_cache(KINDS, 2, 12, rollback=12),  # so that nothing is lost
    "paged": lambda: new_paged_cache(KINDS, 2, *[BlockPool(9, 4) for _ in range(3)]),
    "bound": lambda: bound(KINDS),
    "tail": lambda: new_cache(KINDS, 2, 12, tail=3),
}


@pytest.mark.parametrize("name", CACHES)
def test_every_layer_reads_what_was_written_to_it_and_nothing_else(name: str) -> None:
    cache = CACHES[name]()
    assert list(cache.layer_kinds) == KINDS
    written: list[list[tuple[Tensor, Tensor]]] = [[] for _ in KINDS]
    for T in (5, 1, 3, 1):
        cache.reserve([T, T], T)
        for layer, kind in enumerate(KINDS):
            keys = torch.randn(2, kind.kv_heads, T, kind.key_dim, dtype=torch.float64)
            values = torch.randn(2, kind.kv_heads, T, kind.value_dim, dtype=torch.float64)
            written[layer].append((keys, values))
            view = cache.update(layer, keys, values)
            assert [x.shape[1] for x in view.read()] == [kind.kv_heads] * 2
    for layer, parts in enumerate(written):
        for row in (0, 1):
            expected = [torch.cat(side, 2)[row] for side in zip(*parts, strict=True)]
            for found, one in zip(cache.entries(layer, row), expected, strict=True):
                assert found.equal(one)


def test_bytes_per_token_are_the_sum_over_kinds() -> None:
    """8 B times 3·8 for each of two narrow layers, 1·14 for the wide, 2·5 for keys alone."""
    cache = new_cache(KINDS, 2, 12)
    assert cache.bytes_per_token == 8 * (2 * 24 + 14 + 10)
    assert cache.allocated_bytes == 2 * 12 * cache.bytes_per_token
    assert [kind.bytes_per_token for kind in KINDS] == [192, 112, 192, 80]


@pytest.mark.parametrize("change", [{"kv_heads": 2}, {"value_dim": 5}, {"dtype": torch.float32}])
def test_layers_that_differ_in_anything_do_not_share_a_group(change: dict[str, Any]) -> None:
    cache = new_cache([WIDE, WIDE._replace(**change), WIDE], 1, 4)
    assert [group.layers for group in cache.groups] == [2, 1]


@pytest.mark.parametrize(
    ("keys", "values", "why"),
    [
        ((2, 1, 3, 8), (2, 1, 3, 5), "values of shape .2, 1, 3, 6."),
        ((2, 1, 2, 8), (2, 1, 2, 6), "keys of shape .2, 1, 3, 8."),
        ((1, 1, 3, 8), (1, 1, 3, 6), "keys of shape"),
        ((2, 3, 8), (2, 3, 6), "keys of shape"),
    ],
)
def test_keys_of_another_shape_are_refused_before_anything_is_written(
    keys: tuple[int, ...], values: tuple[int, ...], why: str
) -> None:
    cache = new_cache([WIDE], 2, 8)
    cache.reserve([3, 3], 3)
    with pytest.raises(ValueError, match=why):
        cache.update(0, *(torch.ones(shape, dtype=torch.float64) for shape in (keys, values)))
    assert not any(tensor.any() for tensor in cache.tensors)


@pytest.mark.parametrize(
    "change", [lambda x: x.float(), lambda x: x.to("meta"), lambda x: x.requires_grad_()]
)
def test_keys_of_another_type_or_place_are_refused_before_anything_is_written(change: Any) -> None:
    cache = new_cache([WIDE], 1, 8)
    cache.reserve([1], 1)
    keys = torch.ones(1, 1, 1, 8, dtype=torch.float64)
    values = torch.ones(1, 1, 1, 6, dtype=torch.float64)
    for pair in ((change(keys.clone()), values), (keys, change(values.clone()))):
        with pytest.raises(ValueError, match=r"cache waits for|ask for gradients"):
            cache.update(0, *pair)
    assert not any(tensor.any() for tensor in cache.tensors)
    cache.update(0, keys, values)


# ---- Nothing in a step is read back from the device


class ReadBack(TorchDispatchMode):
    """Notes every operation that gives the host a number, for which it would have to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func) or "nonzero" in str(func) or str(func) == "equal":
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


STORES = {"dense": {}, "int8": {"store": quantized(INT8.grouped(3))}, "tail": {"tail": 2}}


def test_a_number_that_is_read_back_is_noticed() -> None:
    with ReadBack() as noted:
        int(torch.ones(2).sum())
    assert noted.found


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("counts", [[1, 1], [1, 0], [0, 1]], ids=str)
@pytest.mark.parametrize("windows", ["no window", "3 and 2 sinks", "2 local : 1 global"])
@pytest.mark.parametrize("place", ["contiguous", "ring", "paged"])
def test_a_decode_step_reads_nothing_back(
    place: str, windows: str, counts: list[int], store: str
) -> None:
    """A host that reads two numbers back in every forward waits for the device every time."""
    model = model_of("two query heads share one", windows)
    if place == "paged":
        pools = [BlockPool(12, 4) for _ in set(model.config.windows)]
        cache = model.new_paged_cache(2, *pools, **STORES[store])
    else:
        rollback = 1 if place == "ring" else None
        cache = model.new_cache(2, 20, rollback=rollback, **STORES[store])
    model(torch.tensor([text(7), text(7, 1)]), cache)
    step = torch.tensor([[3], [4]])
    with ReadBack() as noted:
        model(step, cache, counts=counts, last_only=True)
        model(step, cache, counts=counts, last_only=True)
    assert noted.found == []


def test_ids_from_lists_are_checked_where_they_become_tensors() -> None:
    model = toy()
    with pytest.raises(ValueError, match="from 0 to 28, got 29"):
        stream_cached(model, [[1, 29]], 2)
    cache = model.new_cache(1, 4)
    for wrong in (29, -1):
        with pytest.raises(ValueError, match=f"from 0 to 28, got {wrong}"):
            model(torch.tensor([[1, wrong]]), cache)
        assert cache.lengths == (0,)
