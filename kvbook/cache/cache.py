"""The KV cache: lengths, and the two choices that it is made of.

Knows: how many tokens each row holds, as Python integers; when a placement and a store are
asked. Does not know: where the placement puts a token, how the store encodes it, what attention
does with what it reads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbook.cache.placement import Contiguous, Slots
from kvbook.cache.step import Step, check_counts, last_positions, ragged_step, uniform_step
from kvbook.cache.store import DenseStore
from kvbook.cache.view import NOT_A_TOKEN, KVView
from kvbook.errors import CacheFullError


class KVCache:
    """Keys and values of up to ``placement.rows`` sequences.

    One forward pass is one ``reserve`` and then one ``update`` per layer. ``window`` is the
    number of keys visible to a query, itself included; ``None`` means all of the past.
    """

    def __init__(
        self, placement: Contiguous, store: DenseStore, window: int | None = None
    ) -> None:
        if (placement.rows, placement.capacity) != (store.rows, store.slots):
            raise ValueError(
                f"the placement has {placement.rows} rows of {placement.capacity} slots, the store "
                f"{store.rows} rows of {store.slots}; make both for the same numbers"
            )
        self.placement, self.store, self.window = placement, store, window
        self._line = torch.arange(placement.capacity, device=store.device)
        self._lengths = [0] * placement.rows
        self._step: Step | None = None
        self._slots: Slots | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens held by each active row. The length is the sequence's, whatever the layer."""
        return tuple(self._lengths)

    @property
    def capacity(self) -> int:
        """Tokens that one row can hold."""
        return self.placement.capacity

    @property
    def allocated_bytes(self) -> int:
        """Bytes of storage, used or not."""
        return self.store.allocated_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold a token of an active row."""
        return sum(self._lengths) * self.store.bytes_per_slot

    def reserve(self, counts: Sequence[int], T: int) -> Step:
        """Make room for one forward pass: row b adds its last ``counts[b]`` of T tokens.

        Positions, slots, mask and lengths are settled here, once, before the first layer.
        Raises ``CacheFullError`` if a row has no room and ``ValueError`` if the batch is not the
        cache's; nothing has changed then.
        """
        starts = self._lengths
        if len(counts) != len(starts):
            raise ValueError(
                f"the input has {len(counts)} rows, but the cache has {len(starts)} active rows; "
                "make a cache for this batch, or choose rows with select()"
            )
        counts = check_counts(counts, len(starts), T)
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self.placement.check_room(ends)
        start = starts[0]
        if all(s == start for s in starts) and all(count == T for count in counts):
            self._slots = self.placement.uniform(len(starts), start, T)
            self._step = uniform_step(start, T, self._line, self.window)
        else:
            self._slots = self.placement.ragged(starts, counts, T, self.store.device)
            for row, first, stop in self._slots.stale:
                self.store.fill(row, first, stop, 0.0)
            queries = last_positions(ends, counts, T, self.store.device)
            self._step = ragged_step(queries, self._positions(ends), self.window)
        self._lengths = ends
        return self._step

    def update(self, layer: int, keys: Tensor, values: Tensor) -> KVView:
        """Store one layer's new keys and values, (B, Hkv, T, D) each, and return what it reads.

        The new tokens are in the view: a token sees itself.
        """
        if self._step is None or self._slots is None:
            raise ValueError("update() without reserve(): call reserve() once per forward pass")
        slots, step = self._slots, self._step
        self.store.write(layer, slots.target, keys[slots.source], values[slots.source])
        read_keys, read_values = self.store.read(layer, slots.read)
        return KVView(read_keys, read_values, step.keys, step.mask, step.is_causal)

    def entries(self, layer: int, row: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values that one row holds in one layer, (Hkv, n, D) each, in position order."""
        if row not in range(len(self._lengths)):
            raise ValueError(f"row must be from 0 to {len(self._lengths) - 1}, got {row!r}")
        where = (slice(row, row + 1), slice(None), slice(0, self._lengths[row]))
        keys, values = self.store.read(layer, where)
        return keys[0], values[0]

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget every token from position ``lengths[b]`` on (one integer: the same for all rows).

        The storage stays where it is. Raises ``ValueError`` for a length that is negative or
        above the present one; nothing has changed then.
        """
        new = [lengths] * len(self._lengths) if isinstance(lengths, int) else lengths
        fits = (
            isinstance(new, Sequence)
            and len(new) == len(self._lengths)
            and all(
                isinstance(n, int) and 0 <= n <= old
                for n, old in zip(new, self._lengths, strict=True)
            )
        )
        if not fits:
            raise ValueError(
                f"truncate() takes one length per row, from 0 to the present one, got {new}; "
                f"present lengths are {self._lengths}"
            )
        self._set_lengths(list(new))

    def reset(self) -> None:
        """Empty every row and make all rows active."""
        self._set_lengths([0] * self.placement.rows)

    def select(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what row ``rows[i]`` held: reorder, drop or fork sequences.

        Raises ``ValueError`` for an unknown row and ``CacheFullError`` for more rows than the
        cache has; nothing has changed then.
        """
        active = len(self._lengths)
        known = isinstance(rows, Sequence) and all(
            isinstance(r, int) and 0 <= r < active for r in rows
        )
        if not known or not rows:
            raise ValueError(f"select() takes active rows from 0 to {active - 1}, got {rows}")
        if len(rows) > self.placement.rows:
            raise CacheFullError(
                f"select() was given {len(rows)} rows, but the cache has {self.placement.rows}; "
                "make a cache with a larger batch"
            )
        lengths = [self._lengths[r] for r in rows]
        self.store.copy_rows(list(rows), max(lengths))
        self.placement.mark_dirty(len(rows), max(lengths))
        self._set_lengths(lengths)

    def fill_unused(self, value: float) -> None:
        """Write ``value`` into every slot without a token: for tests of what must not matter."""
        lengths = self._lengths + [0] * (self.placement.rows - len(self._lengths))
        for row, length in enumerate(lengths):
            self.store.fill(row, length, self.capacity, value)
        self.placement.mark_dirty(self.placement.rows, self.capacity)

    def _set_lengths(self, lengths: list[int]) -> None:
        self._lengths, self._step, self._slots = lengths, None, None

    def _positions(self, ends: Sequence[int]) -> Tensor:
        """Positions of the slots that are read, (B, S), NOT_A_TOKEN beyond a row's end."""
        line = self._line[None, : max(ends)]
        beyond = line >= torch.tensor(ends, device=line.device)[:, None]
        return line.masked_fill(beyond, NOT_A_TOKEN)
