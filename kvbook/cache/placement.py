"""Logical position to slot.

Knows: lengths, capacities and slots. Does not know: what a slot holds, masks, layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvbook.cache.step import common_start
from kvbook.cache.store import Index, Store
from kvbook.cache.view import NOT_A_TOKEN
from kvbook.errors import CacheFullError

EVERYTHING = slice(None)
Run = tuple[int, int, int]  # (row, start, stop) of the store


@dataclass(frozen=True)
class Plan:
    """Where one forward pass writes and reads: written first, so a token reads itself too."""

    source: Index  # which of the new tokens, (B, T, …), are written …
    target: Index  # … and to which (rows, slots) of the store
    read: Index  # what attention reads
    positions: Tensor  # (1 or B, S) int64: what the slots that are read hold
    stale: list[Run] = field(default_factory=list)  # read without a token: to be zero before
    copies: list[tuple[list[int], list[int]]] = field(default_factory=list)  # slots, from and to

    def move(self, store: Store, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, (B, T, Hkv, D), and return what attention reads."""
        store.write(layer, self.target, keys[self.source], values[self.source])
        return store.read(layer, self.read)


class Placement(Protocol):
    """What a cache asks of a placement. Lengths are the caller's; rows are 0, 1, …"""

    @property
    def rows(self) -> int:
        """Sequences."""

    @property
    def capacity(self) -> int | None:
        """Tokens that one row can hold; ``None`` where a row has no limit of its own."""

    @property
    def store_shape(self) -> tuple[int, int]:
        """Rows and slots per row of the store that belongs to it."""

    def check_window(self, window: int | None, sinks: int) -> None:
        """Raise ``ValueError`` if tokens are dropped that such a window still sees."""

    def check_tile(self, tile: int) -> None:
        """Raise ``ValueError`` if ``tile`` consecutive positions are not consecutive slots."""

    def check_room(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Raise ``CacheFullError`` if the rows cannot grow so far; nothing has changed then."""

    def plan(
        self, starts: Sequence[int], counts: Sequence[int], T: int, queries: Tensor
    ) -> Plan:
        """Room for the last ``counts[b]`` of T tokens, at positions ``queries`` (1 or B, T)."""

    def check_truncate(self, lengths: Sequence[int]) -> None:
        """Raise ``ValueError`` if what these lengths need is no longer there."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget positions from ``lengths[b]`` on."""

    def check_select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise ``CacheFullError`` if the rows cannot become these."""

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Row i becomes what row ``rows[i]`` was; returns how many slots the store must copy."""

    def held(self, row: int, length: int, device: torch.device) -> Index:
        """Slots of one row in the order of positions: (rows, slots) of n tokens."""

    def slots_used(self, lengths: Sequence[int]) -> int:
        """Slots that hold a token."""

    def take_unused(self, lengths: Sequence[int]) -> list[Run]:
        """Slots without a token; they count as written from now on."""


class Contiguous:
    """Position p of row b lives in slot p of row b.

    ``capacity`` is the number of slots per row. ``dirty[b]`` is one past the highest slot of
    row b that may still hold something written earlier; slots above it are zero.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        check_sizes(rows=rows, capacity=capacity)
        self.rows, self.capacity = rows, capacity
        self.store_shape = (rows, capacity)
        self.dirty = [0] * rows
        self._line = torch.empty(0, dtype=torch.long)  # 0, 1, 2, … on the device of the queries

    def check_window(self, window: int | None, sinks: int) -> None:
        """Every token is kept, so any window is served."""

    def check_tile(self, tile: int) -> None:
        """Raise ``ValueError`` if the capacity is not a multiple of ``tile``."""
        if self.capacity % tile:
            raise ValueError(
                f"the store encodes {tile} tokens together, but a row has {self.capacity} slots; "
                f"make the capacity a multiple of {tile}"
            )

    def check_room(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Raise ``CacheFullError`` if a row would end beyond the capacity."""
        for row, end in enumerate(ends):
            if end > self.capacity:
                raise CacheFullError(
                    f"row {row} would hold {end} tokens, but the cache has {self.capacity} slots "
                    "per row; make a cache with a larger capacity or shorten the input"
                )

    def plan(
        self, starts: Sequence[int], counts: Sequence[int], T: int, queries: Tensor
    ) -> Plan:
        start = common_start(starts, counts, T)
        if start is None:
            return self._ragged(starts, counts, T, queries.device)
        # All rows alike: slices only, so that what is read is a view of the storage.
        rows, stop = slice(0, len(starts)), start + T
        self._mark_dirty(len(starts), stop)
        positions = self._positions(stop, queries.device)
        target, read = (rows, slice(start, stop)), (rows, slice(0, stop))
        return Plan((EVERYTHING, EVERYTHING), target, read, positions)

    def _ragged(
        self, starts: Sequence[int], counts: Sequence[int], T: int, device: torch.device
    ) -> Plan:
        """Row b adds the last ``counts[b]`` of T left-padded tokens at slot ``starts[b]``."""
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        slots = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        columns = [range(T - count, T) for count in counts]
        source, target = ragged_indices(columns, slots, device)
        longest = max(ends)
        # Weight zero times a stale NaN is NaN, so a short row's tail must be zero before it is
        # read. The whole tail is cleared at once: after that nothing is cleared twice.
        stale = [(b, end, self.dirty[b]) for b, end in enumerate(ends)
                 if end < min(longest, self.dirty[b])]
        for b, end, _ in stale:
            self.dirty[b] = end
        self.dirty[: len(ends)] = [max(d, e) for d, e in zip(self.dirty, ends, strict=False)]
        line = self._positions(longest, device)
        beyond = line >= torch.tensor(ends, device=device)[:, None]
        positions = line.masked_fill(beyond, NOT_A_TOKEN)
        return Plan(source, target, (slice(0, len(ends)), slice(0, longest)), positions, stale)

    def check_truncate(self, lengths: Sequence[int]) -> None:
        """Every token is kept, so any shorter length is possible."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """The slots stay as they are; ``dirty`` remembers that they hold something."""

    def check_select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Rows are copied in place: there is always room."""

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        self._mark_dirty(len(rows), max(lengths))
        return max(lengths)

    def held(self, row: int, length: int, device: torch.device) -> Index:
        return slice(row, row + 1), slice(0, length)

    def slots_used(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def take_unused(self, lengths: Sequence[int]) -> list[Run]:
        lengths = [*lengths, *[0] * (self.rows - len(lengths))]
        self._mark_dirty(self.rows, self.capacity)
        return [(row, length, self.capacity) for row, length in enumerate(lengths)]

    def _positions(self, stop: int, device: torch.device) -> Tensor:
        """0 … stop-1, (1, stop): a slice of one tensor, so that a step writes no positions."""
        if len(self._line) < self.capacity or self._line.device != device:
            self._line = torch.arange(self.capacity, device=device)
        return self._line[None, :stop]

    def _mark_dirty(self, rows: int, stop: int) -> None:
        self.dirty[:rows] = [max(d, stop) for d in self.dirty[:rows]]


def check_sizes(**sizes: Any) -> None:
    """Raise ``ValueError`` unless every size is a positive integer."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def ragged_indices(
    columns: Sequence[Sequence[int]], slots: Sequence[Sequence[int]], device: torch.device
) -> tuple[Index, Index]:
    """Source and target of a ragged write: column ``columns[b][i]`` goes to slot ``slots[b][i]``.

    Two pairs of int64 tensors, (N,) each, one entry per token that is written.
    """
    rows = [row for row, run in enumerate(slots) for _ in run]
    row, column, slot = (
        torch.tensor(x, device=device, dtype=torch.long)
        for x in (rows, [c for run in columns for c in run], [s for run in slots for s in run])
    )
    return (row, column), (row, slot)
