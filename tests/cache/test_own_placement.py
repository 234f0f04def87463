"""A placement as somebody outside would write it, from kvbook/README.md: rows fill from the back.

What it reads stands in no ascending order, and its plans do not say so: a text's first pass must
not be masked as if it did.
"""

from collections.abc import Sequence

import pytest
import torch
from oracles.cache_kinds import STORES, Placed, Stored, fits, formulas
from oracles.toys import text, toy

from kvbook.cache import KVCache, Placement, Plan, Step
from kvbook.cache.build import cache_of
from kvbook.cache.placement import Run, ragged_indices
from kvbook.cache.store import Where
from kvbook.cache.view import NOT_A_TOKEN
from kvbook.errors import CacheFullError
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")


class FromTheBack(Placement):
    """Position p of a row lies in slot capacity - 1 - p."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity, self.store_shape = rows, capacity, (rows, capacity)
        self.last = capacity - 1

    def check_room(self, step: Step) -> None:
        if max(step.ends) > self.last + 1:
            raise CacheFullError(f"no room for {max(step.ends)} tokens in {self.last + 1} slots")

    def plan(self, step: Step) -> Plan:
        longest = max(step.ends)
        slots = [[self.last - p for p in run] for run in step.new_positions]
        source, target = ragged_indices(step.columns, slots, step.device)
        positions = torch.arange(longest - 1, -1, -1)[None]
        beyond = positions >= torch.tensor(step.ends)[:, None]
        first = self.last + 1 - longest
        stale = [(row, first, self.last + 1 - end) for row, end in enumerate(step.ends)]
        read = (slice(step.rows), slice(first, self.last + 1))
        return Plan(source, target, read, positions.masked_fill(beyond, NOT_A_TOKEN), stale)

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        return self.last + 1

    def slots_of(self, row: int, length: int, device: torch.device) -> Where:
        return row, torch.arange(self.last, self.last - length, -1)[None]

    def unused_runs(self, lengths: Sequence[int]) -> list[Run]:
        lengths = [*lengths, *[0] * (self.rows - len(lengths))]
        return [(row, 0, self.last + 1 - length) for row, length in enumerate(lengths)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 1, 3, 1]], ids=str)
def test_every_position_has_the_logits_of_a_recompute(
    chunks: list[int], window: int | None
) -> None:
    model = toy(window=window)
    cache = cache_of(model.layer_kinds, [FromTheBack(2, 12)])
    texts = [text(9, 1), text(9, 2)]
    done = 0
    for T in chunks:
        cache.fill_unused(float("nan"))
        out = model(torch.tensor([one[done : done + T] for one in texts]), cache)
        for row, one in enumerate(texts):
            expected = formulas(model, tuple(one))[done : done + T]
            torch.testing.assert_close(out[row], expected, rtol=0, atol=1e-9)
        done += T
    cache.select([1, 1])
    cache.truncate([9, 4])
    out = model(torch.tensor([[0, 7], [5, 6]]), cache, counts=[1, 2])
    for row, (tokens, count) in enumerate((([*texts[1], 7], 1), ([*texts[1][:4], 5, 6], 2))):
        expected = formulas(model, tuple(tokens))[-count:]
        torch.testing.assert_close(out[row, -count:], expected, rtol=0, atol=1e-9)


def from_the_back(model: Transformer, rows: int, capacity: int, stored: Stored) -> KVCache:
    placements = [FromTheBack(rows, capacity) for _ in set(model.layer_kinds)]
    return cache_of(model.layer_kinds, placements, stored.make, stored.tail)


@pytest.mark.parametrize("name", STORES)
def test_an_entry_of_the_contract_says_which_stores_a_placement_takes(name: str) -> None:
    """Written by hand beside its maker; what it leaves out is what the placement refuses."""
    placed, stored, model = Placed(from_the_back, largest_tile=1), STORES[name], toy()
    assert fits(placed, stored, model) == ("per channel" not in name)
    if fits(placed, stored, model):
        assert placed.new(model, 2, 8, stored).capacity == 8
    else:
        with pytest.raises(ValueError, match="neighbors stay together"):
            placed.new(model, 2, 8, stored)
