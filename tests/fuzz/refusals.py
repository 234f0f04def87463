"""Calls that must be refused in every state, and must leave it as it was."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from oracles.toys import toy

from kvbook.cache import BlockPool, BlockTable
from kvbook.generate import generate_cached

Call = Callable[[], object]


def tokens(rows: int, T: int, token: int = 0) -> torch.Tensor:
    return torch.full((rows, T), token, dtype=torch.long)


def of_rows(m: Any, what: str, seed: int) -> Call:
    """The call of that name on the machine's cache, as it is now."""
    return lambda: OF_ROWS[what](m, seed)


def with_autocast(m: Any, seed: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        m.model(tokens(len(m.texts), 1), m.cache)


def update(m: Any, layer: int) -> None:
    kind = m.cache.layer_kinds[layer]
    keys, values = (
        torch.zeros(len(m.texts), kind.kv_heads, 1, width, dtype=kind.dtype)
        for width in (kind.key_dim, kind.value_dim)
    )
    m.cache.update(layer, keys, values)


def step(m: Any, rows: int, counts: list[int] | None = None, token: int = 0) -> None:
    m.model(tokens(rows, 1, token), m.cache, counts=counts)


def too_far(m: Any) -> int:
    """More tokens than any row here can take."""
    return m.model.config.max_positions + 1


OF_ROWS: dict[str, Callable[[Any, int], object]] = {
    "too many tokens": lambda m, s: m.model(tokens(len(m.texts), too_far(m)), m.cache),
    "too many in one row": lambda m, s: m.model(
        tokens(len(m.texts), too_far(m)), m.cache,
        counts=[too_far(m) if row == s % len(m.texts) else 0 for row in range(len(m.texts))],
    ),
    "too many rows": lambda m, s: step(m, len(m.texts) + 1),
    "a count too many": lambda m, s: step(m, len(m.texts), [1] * (len(m.texts) + 1)),
    "a count beyond T": lambda m, s: step(m, len(m.texts), [2] * len(m.texts)),
    "a count below zero": lambda m, s: step(m, len(m.texts), [-1] * len(m.texts)),
    "a token beyond the vocabulary": lambda m, s: step(m, len(m.texts), None, m.vocab),
    "a token below zero": lambda m, s: step(m, len(m.texts), None, -1),
    "tokens that are floats": lambda m, s: m.model(torch.zeros(len(m.texts), 1), m.cache),
    "no tokens": lambda m, s: m.model(tokens(len(m.texts), 0), m.cache),
    "another model": lambda m, s: toy(n_layers=7)(tokens(len(m.texts), 1), m.cache),
    "autocast": with_autocast,
    "truncate beyond the present": lambda m, s: m.cache.truncate([n + 1 for n in m.lengths]),
    "truncate one row beyond": lambda m, s: m.cache.truncate([*m.lengths[:-1], m.lengths[-1] + 1]),
    "truncate below zero": lambda m, s: m.cache.truncate(-1),
    "truncate another number of rows": lambda m, s: m.cache.truncate([*m.lengths, 0]),
    "truncate to a boolean": lambda m, s: m.cache.truncate(True),
    "select an unknown row": lambda m, s: m.cache.select([0, len(m.texts)]),
    "select a row below zero": lambda m, s: m.cache.select([-1]),
    "select nothing": lambda m, s: m.cache.select([]),
    "select more rows than there are": lambda m, s: m.cache.select([0] * (m.rows + 1)),
    "update without reserve": lambda m, s: update(m, s % m.layers),
    "update of an unknown layer": lambda m, s: m.cache.update(m.layers, None, None),
    "entries of an unknown row": lambda m, s: m.cache.entries(0, len(m.texts)),
    "entries of an unknown layer": lambda m, s: m.cache.entries(-1, 0),
    "a shallow copy": lambda m, s: copy.copy(m.cache),
    "fill with a word": lambda m, s: m.cache.fill_unused("0"),
    "room for another number of rows": lambda m, s: m.cache.check_room([0] * (len(m.texts) + 1)),
    "reserve for more rows": lambda m, s: m.cache.reserve([0] * (len(m.texts) + 1), 1),
    "reserve below zero": lambda m, s: m.cache.reserve([-1] * len(m.texts), 1),
    "bind rows with slots of their own": lambda m, s: m.cache.bind(
        *[[BlockTable(BlockPool(2, 2), [])]] * len(m.cache.groups), lengths=[0]
    ),
    "prompts for other rows": lambda m, s: generate_cached(
        m.model, [[1]] * (len(m.texts) + 1), 1, cache=m.cache
    ),
    "an empty prompt": lambda m, s: generate_cached(m.model, [[]], 1, cache=m.cache),
    "no new tokens": lambda m, s: generate_cached(
        m.model, [[1]] * len(m.texts), 0, cache=m.cache
    ),
    "a prompt beyond the vocabulary": lambda m, s: generate_cached(
        m.model, [[m.vocab]] * len(m.texts), 1, cache=m.cache
    ),
    "a stop token beyond the vocabulary": lambda m, s: generate_cached(
        m.model, [[1]] * len(m.texts), 1, stop_tokens=[m.vocab], cache=m.cache
    ),
}  # fmt: skip
