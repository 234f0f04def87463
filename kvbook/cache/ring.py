"""A ring of slots: a layer with a window keeps its last tokens and forgets the rest.

Knows: window, sinks, how many tokens may be rolled back. Does not know: masks, what a slot holds.

With R ring slots behind ``sinks`` fixed ones, position p lives in slot p if it is a sink and in
slot sinks + (p - sinks) mod R otherwise. R = W - 1 + r: the W - 1 older tokens that a new one
still sees, and room for r new ones, so that up to r can be taken back and nothing is missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbook.cache.placement import EVERYTHING, Placement, Plan, Run, ragged_indices
from kvbook.cache.sizes import check_counts_from_zero, check_sizes
from kvbook.cache.step import Step
from kvbook.cache.store import Store, Where
from kvbook.cache.view import NOT_A_TOKEN


@dataclass(frozen=True)
class OldThenNew(Plan):
    """A chunk that would overwrite what its own first tokens still see: read, then write."""

    def write_and_read(
        self, store: Store, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What was there and then all that is new, as it will be read later; the last is kept."""
        old = store.read(layer, self.read)
        new = store.round_trip(keys, values)
        seen_keys, seen_values = (torch.cat(pair, 1) for pair in zip(old, new, strict=True))
        store.write(layer, self.target, keys[self.source], values[self.source])
        return seen_keys, seen_values


class Ring(Placement):
    """The last ``window - 1 + rollback`` tokens of each row, and its first ``sinks``.

    ``oldest[b]`` is the first position behind the sinks that row b still has, ``dirty[b]`` one past
    the highest whose slot may hold something written earlier.
    """

    rollback: int

    def __init__(self, rows: int, window: int, rollback: int = 1, sinks: int = 0) -> None:
        check_sizes(rows=rows, window=window, rollback=rollback)
        check_counts_from_zero(sinks=sinks)
        self.rows, self.window, self.rollback, self.sinks = rows, window, rollback, sinks
        self.ring = window - 1 + rollback  # R
        self.store_shape = (rows, sinks + self.ring)
        self.oldest, self.dirty = [sinks] * rows, [0] * rows

    def check_window(self, window: int | None, sinks: int) -> None:
        """Raise ``ValueError`` if the layers see further back than the ring."""
        if window is None or window > self.window or sinks != self.sinks:
            raise ValueError(
                f"the layers see a window of {window} and {sinks} sinks, but the ring keeps "
                f"{self.window} and {self.sinks}; make the ring for the window of the layers"
            )

    def check_write_size(self, size: int) -> None:
        """Raise ``ValueError`` unless sinks and ring are multiples of ``size``."""
        if self.sinks % size or self.ring % size:
            raise ValueError(
                f"the store encodes {size} tokens together, but the ring has {self.sinks} sinks "
                f"and {self.ring} slots (window - 1 + rollback); make both multiples of {size}"
            )

    def check_room(self, step: Step) -> None:
        """There is always room: the oldest tokens give way."""

    def plan(self, step: Step) -> Plan:
        source, target = self._write(step)
        overwrites = max(step.ends) > self.store_shape[1] and self.rollback < step.T
        if not overwrites:
            # Nothing is overwritten that a new token still sees.
            self._let_go_before(step.ends)
            positions, stale = self._read(step.ends, step)
            read = self._slots_read(step.ends)
            return Plan(source, target, read, positions, stale, in_order=step.common_start == 0)
        positions, stale = self._read(step.starts, step)
        self._let_go_before(step.ends)
        both = torch.cat([positions, step.positions.expand(len(positions), -1)], 1)
        read = self._slots_read(step.starts)
        return OldThenNew(source, target, read, both, stale, in_order=step.common_start == 0)

    def check_truncate(self, lengths: Sequence[int]) -> None:
        """Raise ``ValueError`` if a token that is still in the window was overwritten."""
        for row, length in enumerate(lengths):
            needed = max(self.sinks, length - self.window + 1)
            if needed < min(length, self.oldest[row]):
                raise ValueError(
                    f"row {row} cannot go back to {length} tokens: a window of {self.window} then "
                    f"needs position {needed}, and the ring has overwritten everything before "
                    f"{self.oldest[row]}; make the ring with a larger rollback (it has "
                    f"{self.rollback}), or reset() and read the text again"
                )

    def truncate(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            self.oldest[row] = min(self.oldest[row], max(self.sinks, length))
            self.dirty[row] = min(self.dirty[row], self.oldest[row] + self.ring)

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        oldest, dirty = [self.oldest[r] for r in rows], [self.dirty[r] for r in rows]
        self.oldest[: len(rows)], self.dirty[: len(rows)] = oldest, dirty
        return self.store_shape[1]

    def slots_of(self, row: int, length: int, device: torch.device) -> Where:
        slots = [self._slot(p) for p in self._positions_held(row, length)]
        return slice(row, row + 1), torch.tensor(slots, device=device, dtype=torch.long)

    def slots_used(self, lengths: Sequence[int]) -> int:
        return sum(len(self._positions_held(row, n)) for row, n in enumerate(lengths))

    def unused_runs(self, lengths: Sequence[int]) -> list[Run]:
        lengths = [*lengths, *[0] * (self.rows - len(lengths))]
        free = []
        for row, length in enumerate(lengths):
            self.dirty[row] = self.oldest[row] + self.ring
            free += self._runs(row, range(length, self.dirty[row]))
        return free

    def _slot(self, position: int) -> int:
        if position < self.sinks:
            return position
        return self.sinks + (position - self.sinks) % self.ring

    def _positions_held(self, row: int, length: int) -> list[int]:
        return [*range(min(self.sinks, length)), *range(self.oldest[row], length)]

    def _let_go_before(self, ends: Sequence[int]) -> None:
        for row, end in enumerate(ends):
            self.oldest[row] = max(self.oldest[row], end - self.ring)
            self.dirty[row] = max(self.dirty[row], end)

    def _write(self, step: Step) -> tuple[Where, Where]:
        """Sinks and the last R of the new tokens: no slot is written twice in one step."""
        sinks, ring, T = self.sinks, self.ring, step.T
        written = [
            [*range(start, min(end, sinks)), *range(max(start, sinks, end - ring), end)]
            for start, end in zip(step.starts, step.ends, strict=True)
        ]  # positions
        slots = [[self._slot(p) for p in row] for row in written]
        columns = [[T - (end - p) for p in row]
                   for row, end in zip(written, step.ends, strict=True)]
        if step.common_start is not None:
            source = (EVERYTHING, as_index(columns[0], step.device))
            return source, (slice(0, step.rows), as_index(slots[0], step.device))
        return ragged_indices(columns, slots, step.device)

    def _slots_read(self, lengths: Sequence[int]) -> Where:
        return slice(0, len(lengths)), slice(0, min(max(lengths), self.store_shape[1]))

    def _read(self, lengths: Sequence[int], step: Step) -> tuple[Tensor, list[Run]]:
        """Positions in slots 0, 1, …, (1 or B, S), and the slots to clear before reading."""
        device = step.device
        stale = []
        for row, length in enumerate(lengths):
            stale += self._runs(row, range(length, self.dirty[row]))
            self.dirty[row] = min(self.dirty[row], length)
        oldest = self.oldest[: len(lengths)]
        if step.common_start is not None:
            # All rows have one length; what only some of them lost, none of them sees.
            lengths, oldest = lengths[:1], [max(oldest)]
        end, first = (torch.tensor(x, device=device)[:, None] for x in (lengths, oldest))
        slot = torch.arange(min(max(lengths), self.store_shape[1]), device=device)[None]
        # The newest position below the end whose slot this is: they repeat every R.
        newest = end - 1 - torch.remainder(end - 1 - slot, self.ring)
        in_ring = (slot >= self.sinks) & (newest >= first)
        is_sink = (slot < self.sinks) & (slot < end)
        return torch.where(in_ring, newest, torch.where(is_sink, slot, NOT_A_TOKEN)), stale

    def _runs(self, row: int, positions: range) -> list[Run]:
        """The slots of some positions as runs of consecutive ones, each slot once."""
        slots = {self._slot(p) for p in positions[: self.sinks + self.ring]}
        starts = sorted(slot for slot in slots if slot - 1 not in slots)
        stops = sorted(slot + 1 for slot in slots if slot + 1 not in slots)
        return [(row, start, stop) for start, stop in zip(starts, stops, strict=True)]


def as_index(numbers: list[int], device: torch.device | str) -> slice | Tensor:
    """Consecutive numbers as a slice, others as an int64 tensor."""
    first = numbers[0] if numbers else 0
    if numbers == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return torch.tensor(numbers, device=device, dtype=torch.long)
