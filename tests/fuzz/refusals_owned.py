"""Calls on a bound cache that must be refused, and must leave everything as it was."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from kvbook.cache import BlockPool, BlockTable
from kvbook.generate import generate_cached


def bind(m: Any, tables: list[Any], lengths: list[int]) -> None:
    """One row for each list of tables, which are for the groups."""
    m.cache.bind(*map(list, zip(*tables, strict=True)), lengths=lengths)


def first(m: Any, seed: int) -> Any:
    return m.live[seed % len(m.live)]


def step(m: Any, rows: int, token: int = 0) -> None:
    m.model(torch.full((rows, 1), token, dtype=torch.long), m.cache)


def other_pool(m: Any, seed: int) -> None:
    one = first(m, seed)
    tables = [BlockTable(BlockPool(9, m.size), list(t.blocks)) for t in one.tables]
    bind(m, [tables], [one.computed])


def free_blocks(m: Any, seed: int) -> None:
    """A table with a block that is free; if there is none, with one more than there are."""
    tables = []
    for pool in m.pools:
        free = [block for block in range(pool.blocks) if not pool.owners(block)]
        tables.append(BlockTable(pool, [*free, pool.blocks][:1]))
    bind(m, [tables], [0])


OF_OWNED: dict[str, Callable[[Any, int], object]] = {
    "another pool": other_pool,
    "blocks that nobody owns": free_blocks,
    "a length beyond the table": lambda m, s: bind(
        m, [first(m, s).tables], [m.size * len(first(m, s).tables[0].blocks) + 1]
    ),
    "a length below zero": lambda m, s: bind(m, [first(m, s).tables], [-1]),
    "no rows": lambda m, s: m.cache.bind(*[[] for _ in m.pools], lengths=[]),
    "a list of tables too many": lambda m, s: m.cache.bind(
        *[[t] for t in first(m, s).tables], [first(m, s).tables[0]], lengths=[0]
    ),
    "fewer tables than rows": lambda m, s: bind(m, [first(m, s).tables], [0, 0]),
    "select bound rows": lambda m, s: m.cache.select([0] * max(1, len(m.lengths))),
    "truncate beyond the present": lambda m, s: m.cache.truncate([*m.lengths, 0]),
    "more rows than are bound": lambda m, s: step(m, len(m.lengths) + 1),
    "a shallow bound copy": lambda m, s: copy.copy(m.cache),
    "generation for other rows": lambda m, s: generate_cached(
        m.model, [[1]] * (len(m.lengths) + 1), 1, cache=m.cache
    ),
    "a token beyond the vocabulary, bound": lambda m, s: step(m, max(1, len(m.lengths)), m.vocab),
}  # fmt: skip
WITHOUT_SEQUENCES = {
    "blocks that nobody owns", "no rows", "select bound rows", "truncate beyond the present",
    "more rows than are bound", "a shallow bound copy", "generation for other rows",
}  # fmt: skip
