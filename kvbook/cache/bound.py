"""Rows that are bound, from step to step, to block tables that sequences own.

Knows: which tables are the batch now. Does not know: who fills a table, why a sequence runs now.

A row is a place in a batch; a sequence outlives it. So requests can come, wait, return in another
row and go: their owner appends blocks to their tables, and one ``bind`` says who runs next.
"""

from collections import Counter
from collections.abc import Sequence

from kvbook.cache.blocks import BlockPool
from kvbook.cache.bound_table import BoundTable
from kvbook.cache.paged import InBlocks
from kvbook.cache.step import Step
from kvbook.errors import BlockNotInUseError, OutOfBlocksError


class BoundPaged(InBlocks):
    """Slots through tables of one ``pool`` that others own; no rows until they are bound."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._bound: list[BoundTable] = []

    @property
    def rows(self) -> int:  # type: ignore[override]  # as many as were bound last
        return len(self._bound)

    @property
    def tables(self) -> list[list[int]]:
        return [table.blocks for table in self._bound]

    def check_bind(self, tables: Sequence[BoundTable], lengths: Sequence[int]) -> None:
        """Raise ``ValueError`` unless each table is of this pool and its blocks hold the tokens."""
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            if not (hasattr(table, "pool") and hasattr(table, "blocks")):
                raise ValueError(
                    f"row {row} was given {table!r:.80}, which is no block table: it takes a "
                    "sequence of a PrefixCache, or BlockTable(pool, blocks)"
                )
            if table.pool is not self.pool:
                raise ValueError(
                    f"the table of row {row} names blocks of another pool: here they would be "
                    "other tokens' slots; bind tables of the pool that this group was made with"
                )
            self._check_blocks(row, table.blocks, length)

    def bind(self, tables: Sequence[BoundTable]) -> None:
        self._bound = list(tables)

    def check_room(self, step: Step) -> None:
        """Raise ``OutOfBlocksError`` if a table is too short for its new tokens.

        Raises ``ValueError`` if a row would write what others read, or what another row writes.
        """
        size = self.pool.block_size
        written = Counter[int]()
        for row, (start, end) in enumerate(zip(step.starts, step.ends, strict=True)):
            table = self._bound[row].blocks
            self._check_blocks(row, table, start)
            if end > len(table) * size:
                raise OutOfBlocksError(
                    f"row {row} is bound to a table of {len(table)} blocks of {size}, which does "
                    f"not take tokens {start} to {end - 1}; let its owner append() them first"
                )
            new = table[start // size : self.blocks_for(end)] if end > start else []
            final = [block for block in new if not self.pool.writable(block)]
            if final:
                raise ValueError(
                    f"tokens {start} to {end - 1} of row {row} would go into blocks {final}, "
                    "which others read or can find; bind the row with all the tokens that these "
                    "blocks hold"
                )
            written.update(new)
        twice = [block for block, rows in written.items() if rows > 1]
        if twice:
            raise ValueError(
                f"blocks {twice} would be written by two rows of one batch; a fork needs blocks "
                "of its own where it differs: begin() another sequence with its tokens"
            )

    def reset(self) -> None:
        """No row is bound any more; the tables stay with their owners."""
        self._bound = []

    def check_select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise ``ValueError``: rows are bound, not moved."""
        raise ValueError(
            "rows that are bound to tables are not forked or moved by select(): bind() the tables "
            "that shall be the batch, and begin() another sequence for a fork"
        )

    def _check_blocks(self, row: int, blocks: list[int], length: int) -> None:
        size = self.pool.block_size
        if length > len(blocks) * size:
            raise ValueError(
                f"row {row} has {length} tokens in a table of {len(blocks)} blocks of {size}; "
                "bind the table of a sequence that has begun and not ended, with as many tokens "
                "as are written in it"
            )
        unowned = [block for block in blocks if not self.pool.owners(block)]
        if unowned:
            raise BlockNotInUseError(
                f"blocks {unowned} in the table of row {row} have no owner and may hold anything; "
                "bind the table of a sequence that has begun and not ended"
            )
