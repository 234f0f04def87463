"""Bytes and decode time of every placement and store, against a contiguous float32 cache.

Run it from the repository: ``python -m benchmarks.caches [--quick] [--reps N]``. It prints a table
and, as its last line, one JSON object. README.md in this folder says what each column means.

Knows: kinds of caches, alternation, medians. Does not know: why one kind is slower than another.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode import machine
from kvbook.cache import (
    BlockPool,
    CacheGroup,
    DenseStore,
    DirectGroup,
    KVCache,
    Paged,
    Ring,
    SlotMajorStore,
)
from kvbook.cache.build import cache_of
from kvbook.cache.codec import FLOAT4, FLOAT8, INT4, INT8
from kvbook.cache.coded import quantized
from kvbook.model.attention import Attend, attend
from kvbook.model.tiles import attend_by_tiles
from kvbook.model.transformer import Transformer
from kvbook.model.weights import load_smollm2

CONTEXTS = (512, 4096)
WINDOW = 512  # of the rings: at the longer context they hold a part of the text
BLOCK = 16
TAIL = 32
STEPS = 4  # tokens decoded in one repetition, before the context is restored

HEADER = (
    "                                  at {0:>5} tokens                  at {1:>5} tokens\n"
    "kind                        bytes/token   step  attention   bytes/token   step  attention"
    "  growth  read by"
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One way to cache. ``path`` says who reads it: a kernel, or code that shows the idea."""

    name: str
    make: Callable[[Transformer, int], KVCache]
    attend: Attend = attend
    path: str = "kernel"
    window: int | None = None


def contiguous(store: Callable[..., Any], tail: int = 0) -> Callable[[Transformer, int], KVCache]:
    """Every token in its slot."""
    return lambda model, slots: model.new_cache(1, slots, store=store, tail=tail)


def ring(store: Callable[..., Any]) -> Callable[[Transformer, int], KVCache]:
    """The last WINDOW tokens, and STEPS that may be taken back."""

    def make(model: Transformer, slots: int) -> KVCache:
        kinds = [replace(kind, window=WINDOW) for kind in model.layer_kinds]
        return cache_of(kinds, [Ring(1, WINDOW, rollback=STEPS)], store)

    return make


def paged(
    store: Callable[..., Any], group: type[CacheGroup] = CacheGroup
) -> Callable[[Transformer, int], KVCache]:
    """Blocks of BLOCK tokens, in a random order of the pool."""

    def make(model: Transformer, slots: int) -> KVCache:
        pool = BlockPool(-(-slots // BLOCK), BLOCK)
        scattered = pool.allocate(pool.blocks)
        random.Random(0).shuffle(scattered)
        for block in scattered:
            pool.release([block])
        return cache_of(model.layer_kinds, [Paged(1, pool)], store, group=group)

    return make


KIVI = quantized(INT4.per_channel(TAIL), INT4)
KINDS = [
    Kind("contiguous float32", contiguous(DenseStore)),
    Kind("contiguous int8", contiguous(quantized(INT8)), path="reference"),
    Kind("contiguous int4", contiguous(quantized(INT4)), path="reference"),
    Kind("contiguous float8", contiguous(quantized(FLOAT8)), path="reference"),
    Kind("contiguous float4", contiguous(quantized(FLOAT4)), path="reference"),
    Kind("contiguous int4 + tail", contiguous(KIVI, TAIL), path="reference"),
    Kind("ring float32", ring(DenseStore), window=WINDOW),
    Kind("ring int8", ring(quantized(INT8)), path="reference", window=WINDOW),
    Kind("paged float32", paged(SlotMajorStore), path="reference"),
    Kind("paged int8", paged(quantized(INT8)), path="reference"),
    Kind("paged float32, direct", paged(SlotMajorStore, DirectGroup),
         attend_by_tiles(16 * BLOCK), "reference"),
]  # fmt: skip


def fill(cache: KVCache, context: int) -> None:
    """``context`` random tokens' worth of keys and values, the same for every kind."""
    generator = torch.Generator().manual_seed(0)
    cache.reserve([context], context)
    for layer, kind in enumerate(cache.layer_kinds):
        keys, values = (
            torch.randn(1, kind.kv_heads, context, width, generator=generator).to(kind.dtype)
            for width in (kind.key_dim, kind.value_dim)
        )
        cache.update(layer, keys, values)


@contextmanager
def reading(model: Transformer, kind: Kind) -> Iterator[None]:
    """The model as it reads this kind: its window and its way to attend."""
    config, blocks = model.config, model.blocks
    usual = [block.attention.attend for block in blocks]
    model.config = replace(config, window=kind.window)
    for block in blocks:
        block.attention.attend = kind.attend
    try:
        yield
    finally:
        model.config = config
        for block, way in zip(blocks, usual, strict=True):
            block.attention.attend = way


def step_seconds(model: Transformer, kind: Kind, cache: KVCache, tokens: Tensor) -> float:
    """Seconds per token of the whole model, over STEPS tokens that are then taken back."""
    length = cache.lengths[0]
    with reading(model, kind):
        start = time.perf_counter()
        for _ in range(STEPS):
            model(tokens, cache, last_only=True)
        elapsed = time.perf_counter() - start
    cache.truncate(length)
    return elapsed / STEPS


def attention_seconds(model: Transformer, kind: Kind, cache: KVCache, new: list[Tensor]) -> float:
    """Seconds per token of the cache and attention alone: no weight is read."""
    length, (queries, keys, values) = cache.lengths[0], new
    scale = model.config.head_dim**-0.5
    start = time.perf_counter()
    for _ in range(STEPS):
        cache.reserve([1], 1)
        for layer in range(model.config.n_layers):
            kind.attend(queries, cache.update(layer, keys, values), scale)
    elapsed = time.perf_counter() - start
    cache.truncate(length)
    return elapsed / STEPS


@torch.inference_mode()
def measure(
    model: Transformer, kinds: Sequence[Kind], context: int, reps: int
) -> dict[str, dict[str, float]]:
    """Medians of one context. The kinds take turns in random order."""
    kind = model.layer_kinds[0]
    shapes = [
        (model.config.n_heads, kind.key_dim),
        (kind.kv_heads, kind.key_dim),
        (kind.kv_heads, kind.value_dim),
    ]
    new = [torch.randn(1, count, 1, width).to(kind.dtype) for count, width in shapes]
    tokens = torch.randint(0, model.config.vocab_size, (1, 1))
    caches = {kind.name: kind.make(model, rounded(context + STEPS)) for kind in kinds}
    for cache in caches.values():
        fill(cache, context)
    times: dict[str, dict[str, list[float]]] = {
        kind.name: {"step": [], "attention": []} for kind in kinds
    }
    order, turns = random.Random(0), list(kinds)
    for repetition in range(reps + 1):  # the first one is the warm-up
        order.shuffle(turns)
        for kind in turns:
            cache = caches[kind.name]
            pair = {
                "step": step_seconds(model, kind, cache, tokens),
                "attention": attention_seconds(model, kind, cache, new),
            }
            if repetition:
                for name, value in pair.items():
                    times[kind.name][name].append(value)
    return {
        name: {
            "bytes_per_token": caches[name].used_bytes / context,
            **{part: statistics.median(values) for part, values in both.items()},
        }
        for name, both in times.items()
    }


def rounded(slots: int) -> int:
    """Up to a whole number of tiles and blocks."""
    return -(-slots // TAIL) * TAIL


def run(
    model: Transformer, kinds: Sequence[Kind], contexts: tuple[int, int], reps: int
) -> list[Row]:
    """Measure every kind at both contexts and print the table."""
    short, long = (measure(model, kinds, context, reps) for context in contexts)
    base_short, base_long = short[kinds[0].name], long[kinds[0].name]
    rows = []
    for kind in kinds:
        row: Row = {"kind": kind.name, "path": kind.path}
        for context, found, base in (
            (contexts[0], short[kind.name], base_short),
            (contexts[1], long[kind.name], base_long),
        ):
            row[f"bytes_per_token_{context}"] = round(found["bytes_per_token"], 1)
            row[f"step_ratio_{context}"] = round(found["step"] / base["step"], 3)
            row[f"attention_ratio_{context}"] = round(found["attention"] / base["attention"], 3)
            row[f"step_ms_{context}"] = round(1e3 * found["step"], 3)
            row[f"attention_ms_{context}"] = round(1e3 * found["attention"], 3)
        growth = long[kind.name]["attention"] / short[kind.name]["attention"]
        row["attention_growth"] = round(growth, 2)
        rows.append(row)
    print(HEADER.format(*contexts))
    for row in rows:
        cells = "   ".join(
            f"{row[f'bytes_per_token_{c}']:>11,.0f} {row[f'step_ratio_{c}']:>5.2f}x "
            f"{row[f'attention_ratio_{c}']:>8.2f}x"
            for c in contexts
        )
        print(f"{row['kind']:26}  {cells}  {row['attention_growth']:>5.1f}x  {row['path']}")
    return rows


def report(
    load: Callable[[], Transformer], kinds: Sequence[Kind], contexts: tuple[int, int], reps: int
) -> None:
    """Print the table, and then everything as one JSON line."""
    torch.manual_seed(0)
    rows = run(load(), kinds, contexts, reps)
    print(json.dumps({"benchmark": "caches", "rows": rows, "machine": machine()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 repetitions")
    parser.add_argument("--reps", type=int, help="repetitions of each kind (9 unless given)")
    options = parser.parse_args()
    report(load_smollm2, KINDS, CONTEXTS, options.reps or (3 if options.quick else 9))


if __name__ == "__main__":
    main()
