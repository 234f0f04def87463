"""Logical position to slot.

Knows: lengths, capacities and slots. Does not know: what a slot holds, masks, layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvbook.cache.store import Index
from kvbook.errors import CacheFullError

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Slots:
    """Where one forward pass writes and reads."""

    source: Index  # which of the new (B, Hkv, T, D) keys are written …
    target: Index  # … and to which (rows, heads, slots) of the store
    read: Index  # what attention reads
    stale: list[tuple[int, int, int]]  # (row, start, stop): read, but not written since truncation


class Contiguous:
    """Position p of row b lives in slot p of row b.

    ``capacity`` is the number of slots per row. ``dirty[b]`` is one past the highest slot of
    row b that may still hold something written earlier; slots above it are zero.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        for name, value in (("rows", rows), ("capacity", capacity)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        self.rows, self.capacity = rows, capacity
        self.dirty = [0] * rows

    def check_room(self, ends: Sequence[int]) -> None:
        """Raise ``CacheFullError`` if a row would end beyond the capacity."""
        for row, end in enumerate(ends):
            if end > self.capacity:
                raise CacheFullError(
                    f"row {row} would hold {end} tokens, but the cache has {self.capacity} slots "
                    "per row; make a cache with a larger capacity or shorten the input"
                )

    def mark_dirty(self, rows: int, stop: int) -> None:
        """Note that slots below ``stop`` of the first ``rows`` rows may hold something."""
        self.dirty[:rows] = [max(d, stop) for d in self.dirty[:rows]]

    def uniform(self, rows: int, start: int, T: int) -> Slots:
        """All of the first ``rows`` rows add T tokens at ``start``: slices only, so no copy."""
        stop = start + T
        self.mark_dirty(rows, stop)
        every = (EVERYTHING, EVERYTHING, EVERYTHING)
        rows_read = slice(0, rows)
        target = (rows_read, EVERYTHING, slice(start, stop))
        return Slots(every, target, (rows_read, EVERYTHING, slice(0, stop)), [])

    def ragged(
        self, starts: Sequence[int], counts: Sequence[int], T: int, device: torch.device
    ) -> Slots:
        """Row b adds the last ``counts[b]`` of T left-padded tokens at slot ``starts[b]``."""
        rows = [b for b, count in enumerate(counts) for _ in range(count)]
        columns = [t for count in counts for t in range(T - count, T)]
        slots = [start + i for start, n in zip(starts, counts, strict=True) for i in range(n)]
        row, column, slot = (torch.tensor(x, device=device, dtype=torch.long)
                             for x in (rows, columns, slots))
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        longest = max(ends)
        # Weight zero times a stale NaN is NaN, so a short row's tail must be zero before it is
        # read. The whole tail is cleared at once: after that nothing is cleared twice.
        stale = [(b, end, self.dirty[b]) for b, end in enumerate(ends)
                 if end < min(longest, self.dirty[b])]
        for b, end, _ in stale:
            self.dirty[b] = end
        self.dirty[: len(ends)] = [max(d, e) for d, e in zip(self.dirty, ends, strict=False)]
        read = (slice(0, len(ends)), EVERYTHING, slice(0, longest))
        return Slots((row, EVERYTHING, column), (row, EVERYTHING, slot), read, stale)
