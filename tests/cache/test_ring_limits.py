"""What rings take in memory, and what they refuse."""

import pytest
import torch
from oracles.cache_kinds import STORES
from oracles.toys import (
    batch,
    snapshot,
    toy,
    unchanged,
)

from kvbook.cache import CacheGroup, Contiguous, DenseStore, KVCache, LayerKind, Recompute, Ring

pytestmark = pytest.mark.usefixtures("one_thread")


def ring_cache(window: int, rollback: int = 1, sinks: int = 0, rows: int = 1) -> KVCache:
    """One layer, two KV heads of width 40: room for the probe's positions 0 … 39."""
    ring = Ring(rows, window, rollback, sinks)
    kind = LayerKind(2, 40, 40, torch.float64, window, sinks)
    return KVCache(CacheGroup(ring, DenseStore(kind, 1, *ring.store_shape)))


# ---- Sizes: 2 heads, keys and values of width 6, 8 bytes: a token takes 192 bytes per layer


def test_bytes_of_a_ring() -> None:
    """2 layers · 3 rows · (2 sinks + 4 - 1 + 2 slots) · 192 = 8,064."""
    model = toy(window=4, sinks=2)
    cache = model.new_cache(3, 20, rollback=2)
    assert cache.allocated_bytes == 8_064
    assert cache.used_bytes == 0
    model(batch(3, 9), cache, counts=[9, 4, 0])
    assert cache.used_bytes == 2 * (7 + 4) * 192
    cache.truncate([8, 4, 0])
    assert cache.used_bytes == 2 * (6 + 4) * 192
    cache.select([0, 0])
    assert cache.used_bytes == 2 * (6 + 6) * 192
    assert cache.allocated_bytes == 8_064


def test_bytes_of_a_pattern() -> None:
    """Rings of 3 - 1 + 1 slots in two layers, 20 slots in one: 2 · (3 + 3 + 20) · 192 = 9,984."""
    model = toy(n_layers=3, window=(3, None, 3))
    cache = model.new_cache(2, 20, rollback=1)
    assert cache.allocated_bytes == 9_984
    model(batch(2, 7), cache, counts=[7, 2])
    assert cache.used_bytes == (3 + 7 + 3 + 2 + 2 + 2) * 192


# ---- Bad input


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "3"])
def test_a_ring_has_whole_sizes(value: object) -> None:
    for i, name in enumerate(("rows", "window", "rollback")):
        sizes: list[object] = [2, 3, 1]
        sizes[i] = value
        with pytest.raises(ValueError, match=f"{name} must be a positive integer, got {value!r}"):
            Ring(*sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_sinks_are_from_none_on(value: object) -> None:
    with pytest.raises(ValueError, match=f"sinks must be an integer from 0 on, got {value!r}"):
        Ring(2, 3, 1, value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("window", "sinks"), [(4, 1), (None, 1), (3, 2), (3, 0)])
def test_a_ring_that_is_smaller_than_the_layers_window_is_refused(
    window: int | None, sinks: int
) -> None:
    ring = Ring(1, 3, 1, 1)
    with pytest.raises(
        ValueError,
        match=rf"a window of {window} and {sinks} sinks, but the ring keeps 3 and 1; make the ring",
    ):
        CacheGroup(ring, DenseStore(LayerKind(2, 6, 6, torch.float32, window, sinks), 1, 1, 4))


def test_tiles_must_fit_into_ring_and_sinks() -> None:
    tiles = STORES["int8 keys per channel, tail of 3"]
    for window, sinks in ((3, 0), (2, 1)):
        with pytest.raises(ValueError, match=r"2 tokens"):
            toy(window=window, sinks=sinks).new_cache(
                1, 8, store=tiles.make, tail=3, rollback=1
            )
    with pytest.raises(ValueError, match=r"the ring has 1 sinks and 3 slots.*multiples of 2"):
        Ring(1, 3, 1, 1).check_write_size(2)
    with pytest.raises(ValueError, match=r"the ring has 1 sinks and 4 slots.*multiples of 2"):
        Ring(1, 3, 2, 1).check_write_size(2)
    Ring(1, 3, 2, 2).check_write_size(2)


def group(layers: int, rows: int = 1) -> CacheGroup:
    return CacheGroup(Contiguous(rows, 4), DenseStore(LayerKind(1, 2, 2), layers, rows, 4))


def test_a_pattern_names_a_group_for_each_layer() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\] gives the groups \[1, 1\].*hold \[2, 1\]"):
        KVCache(group(2), group(1), pattern=[0, 1])
    with pytest.raises(ValueError, match=r"\[0, 0, 2\] gives the groups \[2, 0\].*hold \[2, 1\]"):
        KVCache(group(2), group(1), pattern=[0, 0, 2])
    with pytest.raises(ValueError, match=r"\[0, 0, 1, 5\] gives the groups \[2, 1\] layers"):
        KVCache(group(2), group(1), pattern=[0, 0, 1, 5])
    with pytest.raises(ValueError, match="2 groups need a pattern"):
        KVCache(group(2), group(1))
    with pytest.raises(ValueError, match=r"one number of rows, got \[1, 2\]"):
        KVCache(group(1), group(1, rows=2), pattern=[0, 1])
    with pytest.raises(ValueError, match="at least one group"):
        KVCache()


@pytest.mark.parametrize("window", [0, -3, (3, 0), (3, 3, 3), 1.5])
def test_a_model_with_an_impossible_window_is_refused(window: object) -> None:
    with pytest.raises(ValueError, match="window"):
        toy(window=window)


def test_the_ring_of_another_window_or_sinks_is_refused_before_it_is_written() -> None:
    model = toy(window=3, sinks=2)
    for other in (toy(window=4, sinks=2), toy(window=3, sinks=1), toy(window=(3, None), sinks=2)):
        cache = other.new_cache(1, 8, rollback=1)
        before = snapshot(cache)
        with pytest.raises(ValueError, match=r"another model: (window|sinks) \w+ instead of \w+"):
            model(torch.tensor([[1, 2]]), cache)
        assert unchanged(cache, before)


def test_without_a_cache_each_layer_has_its_window() -> None:
    kinds = [LayerKind(2, 9, 9, torch.float64, *seen) for seen in ((2, 1), (None, 0))]
    memory = Recompute(1, kinds)
    memory.reserve([4], 4)
    new = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    local, everywhere = (memory.update(layer, new, new) for layer in (0, 1))
    assert local.mask is not None
    assert local.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1],
    ]  # fmt: skip
    assert (everywhere.mask, everywhere.is_causal) == (None, True)
