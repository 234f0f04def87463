"""Every kind of cache that the contract is held against: placements, stores, heads, windows.

A new placement is one line in ``PLACEMENTS``, a new store one line in ``STORES``. What a store
leaves of a vector is written out here once more, from the definitions of the formats.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvbook.cache import BlockPool, DenseStore, KVCache, SlotMajorStore
from kvbook.cache.codec import FLOAT4, FLOAT8, INT4, INT8
from kvbook.cache.coded import quantized
from kvbook.cache.store import Store
from kvbook.model.transformer import Transformer
from oracles.list_cache import ListCache, RoundTrip
from oracles.toys import LATENT, as_it_is, reference_logits, toy

# ---- What is left of vectors (tokens, heads, width) that were stored

INT8_NUMBERS = [float(n) for n in range(-127, 128)]
INT4_NUMBERS = [float(n) for n in range(16)]
# A sign, four bits of exponent with an offset of 7, three of mantissa; no infinity, 448 at most.
E4M3_NUMBERS = [
    sign * size
    for sign in (-1, 1)
    for size in (
        *[m / 8 * 2.0**-6 for m in range(8)],
        *[(8 + m) / 8 * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1],
    )
]
E2M1_NUMBERS = [sign * size for sign in (-1, 1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def nearest(x: Tensor, numbers: list[float]) -> Tensor:
    line = torch.tensor(numbers, dtype=x.dtype)
    return line[(x[..., None] - line).abs().argmin(-1)]


def by_peak(x: Tensor, axis: int, numbers: list[float]) -> Tensor:
    peak = x.abs().amax(axis, keepdim=True).clamp(min=1e-300)
    return nearest(x / peak * max(numbers), numbers) / max(numbers) * peak


def by_range(x: Tensor, axis: int) -> Tensor:
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    reach = (high - low).clamp(min=1e-300)
    return low + nearest((x - low) / reach * 15, INT4_NUMBERS) / 15 * reach


def by_power_of_two(x: Tensor, axis: int) -> Tensor:
    scale = 2.0 ** (x.abs().amax(axis, keepdim=True).clamp(min=1e-30).log2().floor() - 2)
    return nearest(x / scale, E2M1_NUMBERS) * scale


def in_threes(change: Callable[[Tensor], Tensor]) -> RoundTrip:
    """Each three neighboring channels of a token have a scale of their own."""

    def left(x: Tensor) -> Tensor:
        return change(x.unflatten(-1, (x.shape[-1] // 3, 3))).flatten(-2)

    return left


int8 = in_threes(lambda x: by_peak(x, -1, INT8_NUMBERS))
int4 = in_threes(lambda x: by_range(x, -1))
float8 = in_threes(lambda x: by_peak(x, -1, E4M3_NUMBERS))
float4 = in_threes(lambda x: by_power_of_two(x, -1))


def int8_per_channel(x: Tensor) -> Tensor:
    return by_peak(x, 0, INT8_NUMBERS)


def int4_per_channel(x: Tensor) -> Tensor:
    return by_range(x, 0)


# ---- Stores


@dataclass(frozen=True)
class Stored:
    """A maker of stores, the tail before it, and what it leaves of keys and values."""

    make: Callable[..., Store]
    tail: int = 0
    tile: int = 1
    keys: RoundTrip = as_it_is
    values: RoundTrip = as_it_is

    @property
    def is_exact(self) -> bool:
        return self.keys is as_it_is


STORES = {
    "dense": Stored(DenseStore),
    "dense, slot-major": Stored(SlotMajorStore),
    "int8": Stored(quantized(INT8.grouped(3)), keys=int8, values=int8),
    "int4": Stored(quantized(INT4.grouped(3)), keys=int4, values=int4),
    "float8": Stored(quantized(FLOAT8.grouped(3)), keys=float8, values=float8),
    "float4": Stored(quantized(FLOAT4.grouped(3)), keys=float4, values=float4),
    "dense, tail of 3": Stored(DenseStore, tail=3),
    "int4, tail of 2": Stored(quantized(INT4.grouped(3)), 2, keys=int4, values=int4),
    "int8 keys per channel, tail of 3": Stored(
        quantized(INT8.per_channel(2), FLOAT8.grouped(3)), 3, 2, int8_per_channel, float8
    ),
    "int4 per channel, no tail": Stored(
        quantized(INT4.per_channel(2)), 0, 2, int4_per_channel, int4_per_channel
    ),
}


# ---- Placements


@dataclass(frozen=True)
class Placed:
    """How a cache is made: (model, rows, capacity, store). ``rollback`` is that of its rings.

    ``largest_tile`` is how many tokens a store may write together here: 1 for a placement that
    does not keep neighbors together. The stores beyond are left out of the contract, and refused.
    """

    new: Callable[[Transformer, int, int, Stored], KVCache]
    rollback: int | None = None
    largest_tile: int = 2

    def takes(self, stored: Stored) -> bool:
        return stored.tile <= self.largest_tile


def by_the_model(rollback: int | None) -> Placed:
    def make(model: Transformer, rows: int, capacity: int, stored: Stored) -> KVCache:
        return model.new_cache(
            rows, capacity, store=stored.make, tail=stored.tail, rollback=rollback
        )

    return Placed(make, rollback)


def in_blocks(size: int) -> Placed:
    def make(model: Transformer, rows: int, capacity: int, stored: Stored) -> KVCache:
        blocks = rows * (-(-capacity // size) + 1)  # one more per row, for copies on a write
        pools = [BlockPool(blocks, size) for _ in set(model.config.windows)]
        return model.new_paged_cache(rows, *pools, store=stored.make, tail=stored.tail)

    return Placed(make)


PLACEMENTS = {
    "contiguous": by_the_model(None),
    "ring, 1 back": by_the_model(1),
    "ring, 2 back": by_the_model(2),
    "ring, 3 back": by_the_model(3),
    "paged, blocks of 4": in_blocks(4),
}
TOGETHER = [
    (placed, stored)
    for placed, stored in product(PLACEMENTS, STORES)
    if PLACEMENTS[placed].takes(STORES[stored])
]


# ---- Heads and windows: what changes in ``toys.SMALL``

HEADS: dict[str, dict[str, Any]] = {
    "one KV head each": {"n_kv_heads": 4},
    "two query heads share one": {},
    "one KV head for all": {"n_kv_heads": 1},
    "one latent for all": LATENT,
}
WINDOWS: dict[str, dict[str, Any]] = {
    "no window": {},
    "1": {"window": 1},
    "3": {"window": 3},
    "8": {"window": 8},
    "1 and 2 sinks": {"window": 1, "sinks": 2},
    "2 and 2 sinks": {"window": 2, "sinks": 2},
    "3 and 2 sinks": {"window": 3, "sinks": 2},
    "8 and 2 sinks": {"window": 8, "sinks": 2},
    "alternating, local first": {"n_layers": 3, "window": (3, None, 3)},
    "alternating, global first": {"n_layers": 3, "window": (None, 8, None)},
    "2 local : 1 global": {"n_layers": 3, "window": (3, 3, None)},
    "1 global : 2 local, sinks": {"n_layers": 3, "window": (None, 3, 3), "sinks": 2},
    "two windows and global": {"n_layers": 3, "window": (3, None, 8)},
}


def fits(placed: Placed, stored: Stored, model: Transformer) -> bool:
    """Whether the placement takes the store, and every ring is whole tiles (see test_tails)."""
    if not placed.takes(stored):
        return False
    if placed.rollback is None:
        return True
    rings = [w - 1 + placed.rollback for w in model.config.windows if w is not None]
    return not any(slots % stored.tile for slots in [*rings, model.config.sinks])


def model_of(heads: str, windows: str) -> Transformer:
    return toy(**HEADS[heads], **WINDOWS[windows])


def list_cache(placed: Placed, stored: Stored, model: Transformer, rows: int) -> ListCache:
    """The plain model of such a cache."""
    return ListCache(
        model, rows, placed.rollback, stored.tail, stored.tile, stored.keys, stored.values
    )


@lru_cache(maxsize=4096)
def formulas(model: Transformer, tokens: tuple[int, ...], stored: RoundTrip = as_it_is) -> Tensor:
    """``reference_logits``, remembered."""
    return reference_logits(model, tokens, stored)
