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
from kvbook.cache.placement import Plan, Run, check_sizes, ragged_indices
from kvbook.cache.step import common_start
from kvbook.cache.store import Index
from kvbook.cache.view import NOT_A_TOKEN
from kvbook.errors import BlockNotInUseError, OutOfBlocksError


class Paged:
    """Up to ``rows`` sequences over one ``pool``.

    ``tables[b]`` is the block table of row b. It grows when tokens come, and its blocks go back
    when they are forgotten; a fork shares them, and the first to write into a shared block gets
    a copy. A table that was adopted grows and ends in the hands of its owner.
    """

    def __init__(self, rows: int, pool: BlockPool) -> None:
        check_sizes(rows=rows)
        self.rows, self.pool = rows, pool
        self.capacity = None  # one row may take the whole pool
        self.store_shape = (1, pool.blocks * pool.block_size)
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self._adopted = [False] * rows
        # The tables again as one tensor: no Python work per token when slots are looked up.
        self._mirror = torch.zeros(rows, 0, dtype=torch.long)
        self._mirrored: list[list[int]] = [[] for _ in range(rows)]

    def check_adopt(self, table: Sequence[int], length: int) -> None:
        """Raise ``ValueError`` unless the table's blocks are in use and take ``length`` tokens."""
        size = self.pool.block_size
        if not isinstance(length, int) or not 0 <= length <= len(table) * size:
            raise ValueError(
                f"a table of {len(table)} blocks of {size} holds 0 to {len(table) * size} tokens, "
                f"got a length of {length!r}"
            )
        unowned = [block for block in table if not self.pool.owners(block)]
        if unowned:
            raise BlockNotInUseError(
                f"blocks {unowned} of the table have no owner and may hold anything; adopt the "
                "table of a sequence that has begun and not ended"
            )

    def adopt(self, row: int, table: list[int]) -> None:
        """Let an empty row read and write by a table that another owner fills and releases."""
        self.tables[row], self._adopted[row] = table, True

    def release(self, row: int) -> None:
        """Give an adopted table back to its owner."""
        self.tables[row], self._adopted[row] = [], False

    def check_window(self, window: int | None, sinks: int) -> None:
        """Every token is kept, so any window is served."""

    def check_tile(self, tile: int) -> None:
        """Raise ``ValueError`` if a block is not whole tiles."""
        if self.pool.block_size % tile:
            raise ValueError(
                f"the store encodes {tile} tokens together, but a block has "
                f"{self.pool.block_size}; make the block size a multiple of {tile}"
            )

    def check_room(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Raise ``OutOfBlocksError`` if the pool cannot serve all rows.

        Raises ``ValueError`` if an adopted row would write what others read.
        """
        needed, shared = 0, Counter[int]()
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if self._adopted[row]:
                self._check_adopted(row, start, end)
                continue
            needed += max(0, self._blocks_for(end) - len(self.tables[row]))
            place = self._shared_place(row, start, end)
            if place is not None:
                shared[self.tables[row][place]] += 1
        for block, writers in shared.items():
            # If all owners write, the last of them has the block to itself and copies nothing.
            alone = writers == self.pool.owners(block) and not self.pool.kept(block)
            needed += writers - alone
        if needed > self.pool.available:
            raise OutOfBlocksError(
                f"{needed} blocks are needed, but {self.pool.available} of {self.pool.blocks} are "
                "available; drop rows with select(), truncate(), or make a larger pool"
            )

    def plan(self, starts: Sequence[int], counts: Sequence[int], T: int, queries: Tensor) -> Plan:
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        copies = []
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            copies += self._own_last_block(row, start, end)
            missing = self._blocks_for(end) - len(self.tables[row])
            if missing > 0:
                self.tables[row] += self.pool.allocate(missing)
        slots, positions = self._slots(ends, queries.device)
        source, (row, position) = ragged_indices(
            [range(T - count, T) for count in counts],
            [range(start, end) for start, end in zip(starts, ends, strict=True)],
            queries.device,
        )
        if common_start(starts, counts, T) is not None:
            positions = positions[:1]
        return Plan(source, (0, slots[row, position]), (0, slots), positions, copies=copies)

    def check_truncate(self, lengths: Sequence[int]) -> None:
        """Every token is kept, so any shorter length is possible."""

    def truncate(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            if self._adopted[row]:  # its blocks are the owner's, who may want them again
                continue
            keep = self._blocks_for(length)
            gone = self.tables[row][keep:]
            del self.tables[row][keep:]
            self.pool.release(gone)

    def check_select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise ``ValueError`` for a row on an adopted table: only its owner can share it."""
        if any(self._adopted):
            adopted = [row for row, lent in enumerate(self._adopted) if lent]
            raise ValueError(
                f"rows {adopted} are on adopted tables, which cannot be forked or moved; begin "
                "another sequence at the tables' owner"
            )

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Share instead of copy: only tables change, so the store has nothing to do."""
        old = self.tables
        chosen = [
            old[row][: self._blocks_for(length)]
            for row, length in zip(rows, lengths, strict=True)
        ]
        for table in chosen:
            self.pool.share(table)
        for table in old:
            self.pool.release(table)
        self.tables = chosen + [[] for _ in range(self.rows - len(chosen))]
        return 0

    def held(self, row: int, length: int, device: torch.device) -> Index:
        slots, _ = self._slots([0] * row + [length], device)
        return 0, slots[row:]

    def slots_used(self, lengths: Sequence[int]) -> int:
        """Slots that hold a token; one that several rows share counts once."""
        return sum(self._filled(lengths).values())

    def take_unused(self, lengths: Sequence[int]) -> list[Run]:
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

    def _check_adopted(self, row: int, start: int, end: int) -> None:
        """Raise unless the row's table takes tokens start … end-1 and nobody else reads there."""
        if end == start:
            return
        table, size = self.tables[row], self.pool.block_size
        if end > len(table) * size:
            raise OutOfBlocksError(
                f"row {row} has adopted a table of {len(table)} blocks, which do not take tokens "
                f"{start} to {end - 1}; let its owner append() them first"
            )
        written = table[start // size : self._blocks_for(end)]
        final = [block for block in written if not self.pool.writable(block)]
        if final:
            raise ValueError(
                f"tokens {start} to {end - 1} of row {row} would go into blocks {final} of an "
                "adopted table, which others read or can find; adopt the table with all the "
                "tokens that these blocks hold"
            )

    def _filled(self, lengths: Sequence[int]) -> dict[int, int]:
        """Tokens in each block of the tables; a block that several rows share counts once."""
        filled: dict[int, int] = {}
        for table, length in zip(self.tables, lengths, strict=False):
            for place, block in enumerate(table):
                tokens = min(self.pool.block_size, length - place * self.pool.block_size)
                filled[block] = max(filled.get(block, 0), tokens)
        return filled

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _shared_place(self, row: int, start: int, end: int) -> int | None:
        """The place of a block that tokens start … end-1 enter in the middle and may not write."""
        place, offset = divmod(start, self.pool.block_size)
        if end > start and offset and not self.pool.writable(self.tables[row][place]):
            return place
        return None

    def _own_last_block(self, row: int, start: int, end: int) -> list[tuple[list[int], list[int]]]:
        """Copy on write: the slots to copy so that the row can write after position start - 1."""
        place = self._shared_place(row, start, end)
        if place is None:
            return []
        size, offset = self.pool.block_size, start % self.pool.block_size
        old = self.tables[row][place]
        new = self.pool.copy_on_write(old)
        self.tables[row][place] = new
        source, target = (list(range(b * size, b * size + offset)) for b in (old, new))
        return [(source, target)]

    def _slots(self, lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Slots of positions 0, 1, … of each row and the positions, (B, S) both.

        Beyond a row's end the position is NOT_A_TOKEN and the slot that of a live token: what is
        masked is still read, and a stale slot may hold anything. It is the row's own first token,
        so that what is not a number in one row stays there; an empty row borrows another's.
        """
        self._update_mirror(device)
        size, longest = self.pool.block_size, max(lengths)
        table = self._mirror[: len(lengths), : self._blocks_for(longest)]
        offsets = torch.arange(size, device=device)
        slots = (table[:, :, None] * size + offsets).view(len(lengths), -1)[:, :longest]
        line = torch.arange(longest, device=device)
        beyond = line >= torch.tensor(lengths, device=device)[:, None]
        home = [row if n else lengths.index(longest) for row, n in enumerate(lengths)]
        return slots.where(~beyond, slots[home, :1]), line.masked_fill(beyond, NOT_A_TOKEN)

    def _update_mirror(self, device: torch.device) -> None:
        widest = max(map(len, self.tables))
        if widest > self._mirror.shape[1] or self._mirror.device != device:
            self._mirror = torch.zeros(self.rows, 2 * widest, dtype=torch.long, device=device)
            self._mirrored = [[] for _ in range(self.rows)]
        for row, table in enumerate(self.tables):
            if table != self._mirrored[row]:
                self._mirror[row, : len(table)] = torch.tensor(table, device=device)
                self._mirrored[row] = list(table)
