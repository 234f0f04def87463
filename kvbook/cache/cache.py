"""The KV cache: lengths over groups of layers.

Knows: how many tokens each row holds, as Python integers; which layer belongs to which group.
Does not know: where a placement puts a token, how a store encodes it, what attention does with
what it reads.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvbook.cache.group import CacheGroup
from kvbook.cache.paged import Paged
from kvbook.cache.step import check_counts, new_positions
from kvbook.cache.view import View
from kvbook.errors import CacheFullError


class KVCache:
    """Keys and values of up to ``rows`` sequences.

    One forward pass is one ``reserve`` and then one ``update`` per layer. ``pattern[l]`` is the
    group of layer l; without one, all layers belong to the only group. The length is the
    sequence's, whichever layer is asked.
    """

    def __init__(self, *groups: CacheGroup, pattern: Sequence[int] | None = None) -> None:
        if not groups:
            raise ValueError("a cache needs at least one group; give CacheGroup(placement, store)")
        if pattern is None and len(groups) > 1:
            raise ValueError(f"{len(groups)} groups need a pattern: the group of each layer")
        pattern = [0] * groups[0].layout.layers if pattern is None else list(pattern)
        layers = [pattern.count(g) for g in range(len(groups))]
        held = [group.layout.layers for group in groups]
        if layers != held or sum(layers) != len(pattern):
            raise ValueError(
                f"the pattern {pattern} gives the groups {layers} layers, but they hold {held}; "
                "make each group for as many layers as the pattern names it"
            )
        if len({group.rows for group in groups}) > 1:
            raise ValueError(
                f"groups of one cache have one number of rows, got {[g.rows for g in groups]}"
            )
        pools = [group.placement.pool for group in groups if isinstance(group.placement, Paged)]
        if len(set(pools)) < len(pools):
            raise ValueError(
                f"{len(pools)} paged groups share a pool, and could not say together whether it "
                "has room; give each group a BlockPool of its own"
            )
        self.groups, self.rows = groups, groups[0].rows
        self._layers = [(groups[g], pattern[:i].count(g)) for i, g in enumerate(pattern)]
        self._lengths = [0] * self.rows
        self._adopted: set[int] = set()  # rows on a table that another owner fills

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each active row."""
        return tuple(self._lengths)

    @property
    def capacity(self) -> int | None:
        """Tokens that one row can hold; ``None`` if no group sets a limit per row."""
        limits = [group.capacity for group in self.groups if group.capacity is not None]
        return min(limits) if limits else None

    @property
    def layer_kinds(self) -> list[tuple[Any, ...]]:
        """What each layer stores and sees: KV heads, Dk, Dv, dtype, window, sinks."""
        return [(*group.layout[1:], group.window, group.sinks) for group, _ in self._layers]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of storage, used or not."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """The storage itself."""
        return [tensor for group in self.groups for tensor in group.tensors]

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold a token of an active row."""
        return sum(group.used_bytes(self._lengths) for group in self.groups)

    def check_room(self, counts: Sequence[int]) -> None:
        """Raise ``CacheFullError`` if row b cannot hold ``counts[b]`` more tokens."""
        ends = [n + count for n, count in zip(self._lengths, counts, strict=True)]
        for group in self.groups:
            group.check_room(self._lengths, ends)

    def reserve(self, counts: Sequence[int], T: int) -> Tensor:
        """Make room for one forward pass: row b adds its last ``counts[b]`` of T tokens.

        Positions, slots, masks and lengths are settled here, once, before the first layer.
        Returns the positions of the new tokens, (1 or B, T) int64, NOT_A_TOKEN for padding.
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
        self.check_room(counts)
        queries = new_positions(starts, counts, T, self.groups[0].device)
        for group in self.groups:
            group.prepare(starts, counts, T, queries)
        self._lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        return queries

    def update(self, layer: int, keys: Tensor, values: Tensor) -> View:
        """Store one layer's new keys and values, (B, Hkv, T, D) each, and return what it reads.

        The new tokens are in the view: a token sees itself.
        """
        group, inner = self._layers[layer]
        return group.update(inner, keys, values)

    def entries(self, layer: int, row: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values that one row holds in one layer, (Hkv, n, D) each, in position order.

        Where a window has let tokens go, n is smaller than the length.
        """
        if row not in range(len(self._lengths)):
            raise ValueError(f"row must be from 0 to {len(self._lengths) - 1}, got {row!r}")
        group, inner = self._layers[layer]
        return group.entries(inner, row, self._lengths[row])

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget every token from position ``lengths[b]`` on (one integer: the same for all rows).

        The storage stays where it is. Raises ``ValueError`` for a length that is negative or
        above the present one, or that needs tokens which a window has let go; nothing has
        changed then.
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
        for group in self.groups:
            group.check_truncate(new)
        for group in self.groups:
            group.truncate(new)
        self._lengths = list(new)

    def reset(self) -> None:
        """Empty every row, give adopted tables back, and make all rows active."""
        for row in list(self._adopted):
            self.release(row)
        for group in self.groups:
            group.truncate([0] * self.rows)
        self._lengths = [0] * self.rows

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
        if len(rows) > self.rows:
            raise CacheFullError(
                f"select() was given {len(rows)} rows, but the cache has {self.rows}; "
                "make a cache with a larger batch"
            )
        lengths = [self._lengths[r] for r in rows]
        for group in self.groups:
            group.check_select(rows, lengths)
        for group in self.groups:
            group.select(rows, lengths)
        self._lengths = lengths

    def adopt(self, row: int, table: list[int], length: int) -> None:
        """Start an empty row on ``length`` tokens that the blocks of ``table`` hold already.

        Only for paged groups. The row reads and writes by this very list; its owner appends
        blocks before tokens come. The row keeps it until ``release`` or ``reset``. Raises
        ``ValueError`` if the row is not empty or the table is too short; nothing has changed then.
        """
        if row in self._adopted:
            raise ValueError(f"row {row} is on an adopted table already; release() it first")
        if row not in range(len(self._lengths)) or self._lengths[row]:
            raise ValueError(
                f"adopt() needs an active row without tokens, got row {row!r}; present lengths "
                f"are {self._lengths}"
            )
        for group in self.groups:
            group.check_adopt(table, length)
        for group in self.groups:
            group.adopt(row, table, length)
        self._adopted.add(row)
        self._lengths[row] = length

    def release(self, row: int) -> None:
        """Give an adopted table back to its owner; the row is empty then.

        Raises ``ValueError`` for a row that is on no adopted table.
        """
        if row not in self._adopted:
            raise ValueError(
                f"row {row!r} is on no adopted table; rows that are: {sorted(self._adopted)}. "
                "A row of its own is emptied with truncate()"
            )
        for group in self.groups:
            group.release(row)
        self._adopted.remove(row)
        self._lengths[row] = 0

    def fill_unused(self, value: float) -> None:
        """Write ``value`` into every slot without a token: for tests of what must not matter."""
        for group in self.groups:
            group.fill_unused(self._lengths, value)
