"""Slots in the order of positions, as many per row as it may ever hold.

Knows: capacity, and which slots may hold something stale. Does not know: what a slot holds, masks,
layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbook.cache.placement import EVERYTHING, Placement, Plan, Run, ragged_indices
from kvbook.cache.sizes import check_sizes
from kvbook.cache.step import Step
from kvbook.cache.store import Where
from kvbook.cache.view import NOT_A_TOKEN
from kvbook.errors import CacheFullError


class Contiguous(Placement):
    """Position p of row b lives in slot p of row b.

    ``capacity`` is the number of slots per row. ``dirty[b]`` is one past the highest slot of
    row b that may still hold something written earlier; slots above it are zero.
    """

    capacity: int

    def __init__(self, rows: int, capacity: int) -> None:
        check_sizes(rows=rows, capacity=capacity)
        self.rows, self.capacity = rows, capacity
        self.store_shape = (rows, capacity)
        self.dirty = [0] * rows
        self._line = torch.empty(0, dtype=torch.long)  # 0, 1, 2, … on the device of the queries

    def check_write_size(self, size: int) -> None:
        """Raise ``ValueError`` if the capacity is not a multiple of ``size``."""
        if self.capacity % size:
            raise ValueError(
                f"the store encodes {size} tokens together, but a row has {self.capacity} slots; "
                f"make the capacity a multiple of {size}"
            )

    def check_room(self, step: Step) -> None:
        """Raise ``CacheFullError`` if a row would end beyond the capacity."""
        for row, end in enumerate(step.ends):
            if end > self.capacity:
                raise CacheFullError(
                    f"row {row} would hold {end} tokens, but the cache has {self.capacity} slots "
                    "per row; make a cache with a larger capacity or shorten the input"
                )

    def plan(self, step: Step) -> Plan:
        start = step.common_start
        if start is None:
            return self._ragged(step)
        # All rows alike: slices only, so that what is read is a view of the storage.
        rows, stop = slice(0, step.rows), start + step.T
        self._mark_dirty(step.rows, stop)
        positions = self._positions(stop, step.device)
        target, read = (rows, slice(start, stop)), (rows, slice(0, stop))
        return Plan((EVERYTHING, EVERYTHING), target, read, positions, in_order=True)

    def _ragged(self, step: Step) -> Plan:
        """Row b adds the last ``counts[b]`` of T left-padded tokens at slot ``starts[b]``."""
        source, target = ragged_indices(step.columns, step.new_positions, step.device)
        ends, longest = step.ends, max(step.ends)
        # Weight zero times a stale NaN is NaN, so a short row's tail must be zero before it is
        # read. The whole tail is cleared at once: after that nothing is cleared twice.
        stale = [(b, end, self.dirty[b]) for b, end in enumerate(ends)
                 if end < min(longest, self.dirty[b])]
        for b, end, _ in stale:
            self.dirty[b] = end
        self.dirty[: len(ends)] = [max(d, e) for d, e in zip(self.dirty, ends, strict=False)]
        line = self._positions(longest, step.device)
        beyond = line >= torch.tensor(ends, device=step.device)[:, None]
        positions = line.masked_fill(beyond, NOT_A_TOKEN)
        return Plan(source, target, (slice(0, len(ends)), slice(0, longest)), positions, stale)

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        self._mark_dirty(len(rows), max(lengths))
        return max(lengths)

    def slots_of(self, row: int, length: int, device: torch.device) -> Where:
        return slice(row, row + 1), slice(0, length)

    def unused_runs(self, lengths: Sequence[int]) -> list[Run]:
        lengths = [*lengths, *[0] * (self.rows - len(lengths))]
        self._mark_dirty(self.rows, self.capacity)
        return [(row, length, self.capacity) for row, length in enumerate(lengths)]

    def _positions(self, stop: int, device: torch.device | str) -> Tensor:
        """0 … stop-1, (1, stop): a slice of one tensor, so that a step writes no positions."""
        if len(self._line) < self.capacity or self._line.device != device:
            with torch.inference_mode(False):
                self._line = torch.arange(self.capacity, device=device)
        return self._line[None, :stop]

    def _mark_dirty(self, rows: int, stop: int) -> None:
        self.dirty[:rows] = [max(d, stop) for d in self.dirty[:rows]]
