"""A block table that somebody else owns.

Knows: which pool the blocks are of. Does not know: who fills it, what a block holds.
"""

from dataclasses import dataclass
from typing import Protocol

from kvbook.cache.blocks import BlockPool
from kvbook.cache.sizes import check_class


class BoundTable(Protocol):
    """What a row needs of a sequence: position p lies in ``blocks[p // block_size]``.

    Only the sequence's owner changes ``blocks``, and only between two steps.
    """

    @property
    def pool(self) -> BlockPool: ...

    @property
    def blocks(self) -> list[int]: ...


@dataclass
class BlockTable:
    """The plainest of them, for blocks that you allocate and release yourself."""

    pool: BlockPool
    blocks: list[int]

    def __post_init__(self) -> None:
        check_class("pool", self.pool, BlockPool, "BlockPool(blocks, block_size)")
        if not isinstance(self.blocks, list) or any(type(b) is not int for b in self.blocks):
            raise ValueError(f"blocks must be a list of block numbers, got {self.blocks!r:.80}")
