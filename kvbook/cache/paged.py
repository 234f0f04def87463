"""Paging: a row's tokens live in blocks from anywhere in one pool.

Knows: block tables. Does not know: what a block holds, masks, who may share what.

Position p of a row lies in block ``table[p // block_size]``, at offset ``p % block_size``. The
store is one long row of slots, and block b owns the slots from ``b * block_size`` on. (Kwon et al.
2023, arXiv 2309.06180.)
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbook.cache.blocks import BlockPool
from kvbook.cache.placement import Placement, Plan, Run, ragged_indices
from kvbook.cache.sizes import check_class, check_sizes
from kvbook.cache.step import Step
from kvbook.cache.store import Where
from kvbook.cache.view import NOT_A_TOKEN
from kvbook.errors import OutOfBlocksError


class InBlocks(Placement):
    """Rows whose slots are found through block tables, whoever owns these."""

    def __init__(self, pool: BlockPool) -> None:
        check_class("pool", pool, BlockPool, "BlockPool(blocks, block_size)")
        self.pool, self.pools = pool, (pool,)
        self.store_shape = (1, pool.blocks * pool.block_size)
        # The tables again as one tensor: no Python work per token when slots are looked up.
        self._mirror = torch.zeros(0, 0, dtype=torch.long)
        self._mirrored: list[list[int]] = []

    @property
    def tables(self) -> list[list[int]]:
        """The block table of each row."""
        raise NotImplementedError

    def check_write_size(self, size: int) -> None:
        """Raise ``ValueError`` unless a block is a multiple of ``size``."""
        if self.pool.block_size % size:
            raise ValueError(
                f"the store encodes {size} tokens together, but a block has "
                f"{self.pool.block_size}; make the block size a multiple of {size}"
            )

    def plan(self, step: Step) -> Plan:
        """Slots by the tables, which reach to the end of the step."""
        slots, positions = self._slots(step.ends, step.device)
        source, (row, position) = ragged_indices(step.columns, step.new_positions, step.device)
        if step.common_start is not None:
            positions = positions[:1]
        return Plan(source, (0, slots[row, position]), (0, slots), positions, in_order=True)

    def slots_of(self, row: int, length: int, device: torch.device) -> Where:
        slots, _ = self._slots([0] * row + [length], device)
        return 0, slots[row:]

    def slots_used(self, lengths: Sequence[int]) -> int:
        """Slots that hold a token; one that several rows share counts once."""
        return sum(self._filled(lengths).values())

    def unused_runs(self, lengths: Sequence[int]) -> list[Run]:
        size, pool = self.pool.block_size, self.pool
        filled = self._filled(lengths)
        here = Counter(block for table in self.tables for block in table)
        for block in range(pool.blocks):  # what others own, or can find again, is not unused
            if pool.owners(block) > here[block] or pool.kept(block):
                filled[block] = size
        starts = {block: filled.get(block, 0) for block in range(pool.blocks)}
        return [
            (0, block * size + n, (block + 1) * size) for block, n in starts.items() if n < size
        ]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _filled(self, lengths: Sequence[int]) -> dict[int, int]:
        """Tokens in each block of the tables; a block that several rows share counts once."""
        filled: dict[int, int] = {}
        for table, length in zip(self.tables, lengths, strict=False):
            for place, block in enumerate(table):
                tokens = max(0, min(self.pool.block_size, length - place * self.pool.block_size))
                filled[block] = max(filled.get(block, 0), tokens)
        return filled

    def _slots(self, lengths: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Slots of positions 0, 1, … of each row and the positions, (B, S) both.

        Beyond a row's end the position is NOT_A_TOKEN and the slot that of a live token: what is
        masked is still read, and a stale slot may hold anything. It is the row's own first token,
        so that what is not a number in one row stays there; an empty row borrows another's.
        """
        size, longest = self.pool.block_size, max(lengths)
        table = self._tables_on(device)[: len(lengths), : self.blocks_for(longest)]
        offsets = torch.arange(size, device=device)
        slots = (table[:, :, None] * size + offsets).view(len(lengths), -1)[:, :longest]
        line = torch.arange(longest, device=device)
        beyond = line >= torch.tensor(lengths, device=device)[:, None]
        home = [row if n else lengths.index(longest) for row, n in enumerate(lengths)]
        return slots.where(~beyond, slots[home, :1]), line.masked_fill(beyond, NOT_A_TOKEN)

    @torch.inference_mode(False)  # or it could not be written to outside of it
    def _tables_on(self, device: torch.device | str) -> Tensor:
        """All tables as one tensor, (rows, blocks) or larger; only what changed is written."""
        tables = self.tables
        rows, widest = len(tables), max(map(len, tables))
        there = self._mirror
        if rows > len(there) or widest > there.shape[1] or there.device != device:
            self._mirror = torch.zeros(rows, 2 * widest, dtype=torch.long, device=device)
            self._mirrored = [[] for _ in range(rows)]
        for row, table in enumerate(tables):
            if table != self._mirrored[row]:
                self._mirror[row, : len(table)] = torch.tensor(table, device=device)
                self._mirrored[row] = list(table)
        return self._mirror


class Paged(InBlocks):
    """Up to ``rows`` sequences over one ``pool``, whose tables this placement owns.

    ``tables[b]`` is the block table of row b. It grows when tokens come, and its blocks go back
    when they are forgotten; a fork shares them, and the first to write into a shared block gets
    a copy. One row may take the whole pool.
    """

    def __init__(self, rows: int, pool: BlockPool) -> None:
        check_sizes(rows=rows)
        super().__init__(pool)
        self.rows = rows
        self._tables: list[list[int]] = [[] for _ in range(rows)]

    @property
    def tables(self) -> list[list[int]]:
        return self._tables

    def check_room(self, step: Step) -> None:
        """Raise ``OutOfBlocksError`` if the pool cannot serve all rows."""
        needed, shared = 0, Counter[int]()
        for row, (start, end) in enumerate(zip(step.starts, step.ends, strict=True)):
            needed += max(0, self.blocks_for(end) - len(self._tables[row]))
            place = self._shared_place(row, start, end)
            if place is not None:
                shared[self._tables[row][place]] += 1
        for block, writers in shared.items():
            # If all owners write, the last of them has the block to itself and copies nothing.
            alone = writers == self.pool.owners(block) and not self.pool.kept(block)
            needed += writers - alone
        if needed > self.pool.available:
            blocks = "block is" if needed == 1 else "blocks are"
            raise OutOfBlocksError(
                f"{needed} {blocks} needed, but {self.pool.available} of {self.pool.blocks} are "
                "available; drop rows with select(), truncate(), or make a larger pool"
            )

    def plan(self, step: Step) -> Plan:
        copies = []
        for row, (start, end) in enumerate(zip(step.starts, step.ends, strict=True)):
            copies += self._own_last_block(row, start, end)
            missing = self.blocks_for(end) - len(self._tables[row])
            if missing > 0:
                self._tables[row] += self.pool.allocate(missing)
        plan = super().plan(step)
        plan.copies.extend(copies)
        return plan

    def truncate(self, lengths: Sequence[int]) -> None:
        """Give back the blocks that no token is left in."""
        for table, length in zip(self._tables, lengths, strict=False):
            keep = self.blocks_for(length)
            gone = table[keep:]
            del table[keep:]
            self.pool.release(gone)

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Share instead of copy: only tables change, so the store has nothing to do."""
        old = self._tables
        chosen = [
            old[row][: self.blocks_for(length)] for row, length in zip(rows, lengths, strict=True)
        ]
        for table in chosen:
            self.pool.share(table)
        for table in old:
            self.pool.release(table)
        self._tables = chosen + [[] for _ in range(self.rows - len(chosen))]
        return 0

    def _shared_place(self, row: int, start: int, end: int) -> int | None:
        """The place of a block that tokens start … end-1 enter in the middle and may not write."""
        place, offset = divmod(start, self.pool.block_size)
        if end > start and offset and not self.pool.writable(self._tables[row][place]):
            return place
        return None

    def _own_last_block(self, row: int, start: int, end: int) -> list[tuple[list[int], list[int]]]:
        """Copy on write: the slots to copy so that the row can write after position start - 1."""
        place = self._shared_place(row, start, end)
        if place is None:
            return []
        size, offset = self.pool.block_size, start % self.pool.block_size
        old = self._tables[row][place]
        new = self.pool.copy_on_write(old)
        self._tables[row][place] = new
        source, target = (list(range(b * size, b * size + offset)) for b in (old, new))
        return [(source, target)]
