"""State machines: any order of operations, for every kind of cache that has states of its own."""

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles.cache_kinds import (
    PLACEMENTS,
    STORES,
    list_cache,
    model_of,
)
from oracles.toys import batch, reference_logits, snapshot, unchanged
from oracles.twins import Twins

from kvbook.errors import CacheFullError

pytestmark = pytest.mark.usefixtures("one_thread")
NAN = float("nan")


# ---- Any order of operations

ROWS, CAPACITY = 3, 14


class ListOfTokens(RuleBasedStateMachine):
    """A cache and the lists that it should agree with, through any order of operations."""

    placed, stored, windows = "contiguous", "dense", "no window"
    longest: ClassVar[int] = CAPACITY

    @initialize()
    def start(self) -> None:
        model = model_of("two query heads share one", self.windows)
        placed, self.kind = PLACEMENTS[self.placed], STORES[self.stored]
        self.twins = Twins(
            model,
            placed.new(model, ROWS, CAPACITY, self.kind),
            list_cache(placed, self.kind, model, ROWS),
        )

    def _counts(self, data: st.DataObject, T: int) -> list[int]:
        rows = len(self.twins.texts)
        if data.draw(st.booleans(), label="uniform"):
            return [T] * rows
        return data.draw(
            st.lists(st.integers(0, T), min_size=rows, max_size=rows), label="counts"
        )

    def _end(self, counts: list[int]) -> int:
        return max(n + count for n, count in zip(self.twins.lengths, counts, strict=True))

    @rule(data=st.data(), T=st.sampled_from([1, 1, 2, 3, 5]), seed=st.integers(0, 999))
    def forward(self, data: st.DataObject, T: int, seed: int) -> None:
        twins = self.twins
        counts, tokens = self._counts(data, T), batch(len(twins.texts), T, seed)
        if twins.cache.capacity is not None and self._end(counts) > CAPACITY:
            before = snapshot(twins.cache)
            with pytest.raises(CacheFullError):
                twins.model(tokens, twins.cache, counts=counts)
            assert unchanged(twins.cache, before)
        elif self._end(counts) <= self.longest:
            logits = twins.step(tokens, counts)
            if self.kind.is_exact:
                for row, found in enumerate(logits):
                    if len(found):
                        expected = reference_logits(twins.model, twins.texts[row])[-len(found) :]
                        assert (found - expected).abs().max() < 1e-9

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """By any number of tokens, often by few: a ring lets most of the past go."""
        back = st.integers(0, 3) if data.draw(st.booleans()) else st.integers(0, self.longest)
        self.twins.truncate([max(0, n - data.draw(back)) for n in self.twins.lengths])

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        row = st.integers(0, len(self.twins.texts) - 1)
        self.twins.select(data.draw(st.lists(row, min_size=1, max_size=ROWS), label="rows"))

    @precondition(lambda self: any(self.twins.texts))
    @rule()
    def reset(self) -> None:
        self.twins.reset()

    @rule(value=st.sampled_from([NAN, 1e10]))
    def poison(self, value: float) -> None:
        self.twins.cache.fill_unused(value)

    @rule(data=st.data(), T=st.integers(1, 4))
    def not_numbers_rolled_back(self, data: st.DataObject, T: int) -> None:
        counts = self._counts(data, T)
        if self._end(counts) <= self.longest:
            self.twins.spoil(counts, T)

    @rule(data=st.data(), T=st.integers(1, 4), layer=st.sampled_from([0, -1]))
    def fail_midway(self, data: st.DataObject, T: int, layer: int) -> None:
        counts = self._counts(data, T)
        if self._end(counts) <= self.longest:
            self.twins.fail(batch(len(self.twins.texts), T, 7), counts, layer)

    @invariant()
    def holds_what_the_lists_hold(self) -> None:
        self.twins.check()


class ContiguousDense(ListOfTokens):
    """The plain cache; its sizes are known as numbers."""

    @invariant()
    def sizes_agree(self) -> None:
        cache = self.twins.cache
        assert cache.used_bytes == sum(self.twins.lengths) * 384
        assert cache.allocated_bytes == ROWS * CAPACITY * 384


class ContiguousWindow(ListOfTokens):
    windows = "3"


class RingOneBack(ListOfTokens):
    placed, windows, longest = "ring, 1 back", "3", 40


class RingWithSinks(ListOfTokens):
    placed, windows, longest = "ring, 3 back", "3 and 2 sinks", 40


class RingInAPattern(ListOfTokens):
    placed, windows = "ring, 2 back", "1 global : 2 local, sinks"


class RingOfCodes(ListOfTokens):
    placed, stored, windows, longest = "ring, 3 back", "int4", "1 and 2 sinks", 40


class ContiguousCodes(ListOfTokens):
    stored = "float8"


class ExactTail(ListOfTokens):
    stored, windows = "dense, tail of 3", "3"


class TiledTail(ListOfTokens):
    stored = "int8 keys per channel, tail of 3"


class TiledTailOverARing(ListOfTokens):
    placed, stored, windows, longest = (
        "ring, 2 back", "int8 keys per channel, tail of 3", "3 and 2 sinks", 40,
    )  # fmt: skip


class PagedDense(ListOfTokens):
    placed, stored, windows = "paged, blocks of 4", "dense, slot-major", "3 and 2 sinks"


class PagedTiles(ListOfTokens):
    placed, stored = "paged, blocks of 4", "int8 keys per channel, tail of 3"


class TilesWithoutATail(ListOfTokens):
    stored = "int4 per channel, no tail"


def machine(kind: type[ListOfTokens], examples: int) -> type:
    kind.TestCase.settings = settings(max_examples=examples, stateful_step_count=14)
    return kind.TestCase


TestContiguousDense = machine(ContiguousDense, 50)
TestContiguousWindow = machine(ContiguousWindow, 15)
TestRingOneBack = machine(RingOneBack, 50)
TestRingWithSinks = machine(RingWithSinks, 50)
TestRingInAPattern = machine(RingInAPattern, 25)
TestRingOfCodes = machine(RingOfCodes, 20)
TestContiguousCodes = machine(ContiguousCodes, 15)
TestExactTail = machine(ExactTail, 25)
TestTiledTail = machine(TiledTail, 30)
TestTiledTailOverARing = machine(TiledTailOverARing, 40)
TestPagedDense = machine(PagedDense, 40)
TestPagedTiles = machine(PagedTiles, 25)
TestTilesWithoutATail = machine(TilesWithoutATail, 15)
