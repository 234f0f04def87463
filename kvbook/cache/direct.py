"""Reading blocks where they are: a view that copies no more than one tile at a time.

Knows: which slots a step reads. Does not know: attention, how scores are summed over tiles.

On a GPU a paged kernel reads blocks in place, which is what makes paging free. In PyTorch a tile
is gathered, so this shows the idea and its memory, not its speed: with small tiles it is far slower
than gathering everything at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kvbook.cache.group import CacheGroup
from kvbook.cache.paged import InBlocks
from kvbook.cache.placement import Placement
from kvbook.cache.store import Store
from kvbook.cache.view import KVView, View, explicit_mask


@dataclass(frozen=True)
class DirectView:
    """A KVView whose keys and values are still in the store. ``read`` gathers them all."""

    store: Store
    layer: int
    slots: Tensor  # (B, S) int64
    positions: Tensor  # (1 or B, S) int64
    mask: Tensor | None
    is_causal: bool

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values, gathered once."""
        return self._gather(self.slots)

    def tiles(self, size: int) -> Iterator[KVView]:
        """The view in pieces of ``size`` keys, gathered one after the other."""
        mask = explicit_mask(self.positions, self.mask, self.is_causal)
        for start in range(0, self.slots.shape[1], size):
            part = slice(start, start + size)
            keys, values = self._gather(self.slots[:, part])
            part_of_mask = None if mask is None else mask[..., part]
            yield KVView(keys, values, self.positions[:, part], part_of_mask)

    def _gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.store.read(self.layer, (0, slots))
        return keys.transpose(1, 2), values.transpose(1, 2)


class DirectGroup(CacheGroup):
    """A group over blocks whose views gather nothing until they are asked."""

    def __init__(self, placement: Placement, store: Store) -> None:
        if not isinstance(placement, InBlocks):
            raise ValueError(
                f"a direct view reads slots in blocks, got a {type(placement).__name__} "
                "placement; use CacheGroup, whose views of it may be slices"
            )
        super().__init__(placement, store)

    def _store_and_view(self, layer: int, keys: Tensor, values: Tensor) -> View:
        plan, seen = self._plan, self._mask
        assert plan is not None
        assert seen is not None
        new = (x.transpose(1, 2)[plan.source] for x in (keys, values))
        self.store.write(layer, plan.target, *new)
        return DirectView(
            self.store, layer, plan.read[1], seen.positions, seen.mask, seen.is_causal
        )
