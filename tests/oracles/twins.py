"""A cache and its plain model, driven side by side and compared after every operation."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvbook.cache import KVCache, KVView
from kvbook.model.transformer import Transformer
from oracles.list_cache import ListCache
from oracles.toys import snapshot, unchanged


class CrashError(RuntimeError):
    """Something that goes wrong in the middle of a forward pass."""


class Twins:
    """``cache`` is what is tested, ``lists`` what it must agree with, ``texts`` what both hold."""

    def __init__(self, model: Transformer, cache: KVCache, lists: ListCache) -> None:
        self.model, self.cache, self.lists = model, cache, lists
        self.texts: list[list[int]] = [[] for _ in range(cache.rows)]
        self.last = "made"  # the operation that came last

    @property
    def lengths(self) -> list[int]:
        return [len(one) for one in self.texts]

    def step(self, tokens: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """One forward pass; the logits of each row's real tokens."""
        self.last = "step"
        B, T = tokens.shape
        counts = [T] * B if counts is None else list(counts)
        logits = self.model(tokens, self.cache, counts=counts)
        expected = self.model(tokens, self.lists, counts=counts)
        for row, count in enumerate(counts):
            self.texts[row] += tokens[row, T - count :].tolist()
        real = [logits[row, T - count :] for row, count in enumerate(counts)]
        for row, count in enumerate(counts):
            off = (real[row] - expected[row, T - count :]).abs()
            assert not count or off.max() < 1e-9, (row, self.lengths, counts)
        return real

    def truncate(self, lengths: Sequence[int]) -> bool:
        """Whether it was possible; if not, the cache must say so and stay as it is."""
        if not self.lists.can_truncate(lengths):
            before = snapshot(self.cache)
            with pytest.raises(ValueError, match="cannot go back to"):
                self.cache.truncate(lengths)
            assert unchanged(self.cache, before)
            return False
        self.last = "truncate"
        self.cache.truncate(lengths)
        self.lists.truncate(lengths)
        self.texts = [one[:n] for one, n in zip(self.texts, lengths, strict=True)]
        return True

    def select(self, rows: Sequence[int]) -> None:
        self.last = "select"
        self.cache.select(rows)
        self.lists.select(rows)
        self.texts = [list(self.texts[r]) for r in rows]

    def reset(self) -> None:
        self.last = "reset"
        self.cache.reset()
        self.lists.reset()
        self.texts = [[] for _ in range(self.cache.rows)]

    def fail(self, tokens: Tensor, counts: Sequence[int], layer: int) -> bool:
        """A forward pass that fails in ``layer`` after its keys were written, and its rollback.

        Where the rollback is impossible, both are reset.
        """
        before = self.lengths
        crash(self.model, tokens, self.cache, counts, layer)
        self.model(tokens, self.lists, counts=counts)
        self.texts = [[*one, *[0] * count] for one, count in zip(self.texts, counts, strict=True)]
        return self._undo(before, "fail")

    def spoil(self, counts: Sequence[int], T: int) -> bool:
        """A forward pass whose keys and values are not numbers, and its rollback."""
        before = self.lengths
        for memory in (self.cache, self.lists):
            memory.reserve(counts, T)
            for layer, kind in enumerate(self.lists.layer_kinds):
                keys, values = (
                    torch.full(
                        (len(counts), kind.kv_heads, T, D), float("nan"), dtype=torch.float64
                    )
                    for D in (kind.key_dim, kind.value_dim)
                )
                memory.update(layer, keys, values)
        self.texts = [[*one, *[0] * count] for one, count in zip(self.texts, counts, strict=True)]
        return self._undo(before, "spoil")

    def _undo(self, lengths: Sequence[int], last: str) -> bool:
        if self.truncate(lengths):
            self.last = last
            return True
        self.reset()
        return False

    def check(self) -> None:
        """Lengths, and every vector that the cache says it holds."""
        assert self.cache.lengths == tuple(self.lengths)
        for row in range(len(self.texts)):
            for layer in self.lists.layers:
                pairs = zip(
                    self.cache.entries(layer, row), self.lists.entries(layer, row), strict=True
                )
                for found, expected in pairs:
                    assert found.shape == expected.shape, (row, layer)
                    assert (found - expected).abs().sum() < 1e-9, (row, layer)


def crash(
    model: Transformer, tokens: Tensor, cache: KVCache, counts: Sequence[int], layer: int = -1
) -> None:
    """A forward pass that fails in one layer, after its keys were written."""

    def fail(queries: Tensor, view: KVView, scale: float) -> Tensor:
        raise CrashError

    attention = model.blocks[layer].attention
    working, attention.attend = attention.attend, fail
    try:
        with pytest.raises(CrashError):
            model(tokens, cache, counts=counts)
    finally:
        attention.attend = working
