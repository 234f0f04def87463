"""Logical position to slot.

Knows: lengths, capacities and slots. Does not know: what a slot holds, masks, layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbook.cache.blocks import BlockPool
from kvbook.cache.bound_table import BoundTable
from kvbook.cache.step import Step
from kvbook.cache.store import Store, Where

EVERYTHING = slice(None)
Run = tuple[int, int, int]  # (row, start, stop) of the store


@dataclass(frozen=True)
class Plan:
    """Where one forward pass writes and reads: written first, so a token reads itself too."""

    source: Where  # which of the new tokens, (B, T, …), are written …
    target: Where  # … and to which (rows, slots) of the store
    read: Where  # what attention reads
    positions: Tensor  # (1 or B, S) int64: what the slots that are read hold
    stale: list[Run] = field(default_factory=list)  # read without a token: to be zero before
    copies: list[tuple[list[int], list[int]]] = field(default_factory=list)  # slots, from and to
    in_order: bool = False  # whether what is read stands in the order of positions

    def write_and_read(
        self, store: Store, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, (B, T, Hkv, D), and return what attention reads."""
        store.write(layer, self.target, keys[self.source], values[self.source])
        return store.read(layer, self.read)


class Placement:
    """Base of placements. Lengths are the caller's; rows are 0, 1, …

    A new placement sets ``rows`` and ``store_shape`` and fills in the five methods that raise
    here. The others have a default that says what it assumes: override it where that is wrong.
    """

    rows: int  # sequences
    store_shape: tuple[int, int]  # rows and slots per row of the store that belongs to it
    capacity: int | None = None  # tokens that one row can hold; None: no limit of its own
    rollback: int | None = None  # tokens that can be taken back at any time; None: all of them
    pools: tuple[BlockPool, ...] = ()  # where its slots come from, if not from the store alone

    def check_room(self, step: Step) -> None:
        """Raise ``CacheFullError`` if the rows cannot grow so far; nothing has changed then."""
        raise NotImplementedError

    def plan(self, step: Step) -> Plan:
        """Where the new tokens of a step go, and what it reads."""
        raise NotImplementedError

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Row i becomes what row ``rows[i]`` was; returns how many slots the store must copy."""
        raise NotImplementedError

    def slots_of(self, row: int, length: int, device: torch.device) -> Where:
        """Slots of one row that still hold a token, in the order of positions: n of them."""
        raise NotImplementedError

    def unused_runs(self, lengths: Sequence[int]) -> list[Run]:
        """Slots without a token; they count as written from now on."""
        raise NotImplementedError

    def slots_used(self, lengths: Sequence[int]) -> int:
        """Slots that hold a token. By default one for each."""
        return sum(lengths)

    def check_window(self, window: int | None, sinks: int) -> None:
        """Raise ``ValueError`` if tokens are dropped that such a window still sees.

        By default every token is kept, so any window is served.
        """

    def check_write_size(self, size: int) -> None:
        """Raise ``ValueError`` if ``size`` consecutive positions are not consecutive slots.

        By default nothing is known of neighbors.
        """
        if size > 1:
            raise ValueError(
                f"the store encodes {size} tokens together, but a {type(self).__name__} placement "
                "does not say that neighbors stay together; use a store of single tokens"
            )

    def check_truncate(self, lengths: Sequence[int]) -> None:
        """Raise ``ValueError`` if what these lengths need is no longer there.

        By default every token is kept, so any shorter length is possible.
        """

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget positions from ``lengths[b]`` on. By default the slots stay as they are."""

    def reset(self) -> None:
        """Forget everything, in all rows."""
        self.truncate([0] * self.rows)

    def check_select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise ``ValueError`` if the rows cannot become these. By default they always can."""

    def check_bind(self, tables: Sequence[BoundTable], lengths: Sequence[int]) -> None:
        """Raise ``ValueError`` unless rows can read and write by tables that others own."""
        raise ValueError(
            f"bind() needs rows without slots of their own, but a {type(self).__name__} placement "
            "has its own; make the cache with new_bound_cache()"
        )

    def bind(self, tables: Sequence[BoundTable]) -> None:
        """Let the batch be these rows, from now on."""
        raise NotImplementedError


def ragged_indices(
    columns: Sequence[Sequence[int]], slots: Sequence[Sequence[int]], device: torch.device | str
) -> tuple[Where, Where]:
    """Source and target of a ragged write: column ``columns[b][i]`` goes to slot ``slots[b][i]``.

    Two pairs of int64 tensors, (N,) each, one entry per token that is written.
    """
    rows = [row for row, run in enumerate(slots) for _ in run]
    row, column, slot = (
        torch.tensor(x, device=device, dtype=torch.long)
        for x in (rows, [c for run in columns for c in run], [s for run in slots for s in run])
    )
    return (row, column), (row, slot)
