"""A fixed number of blocks, lent out and taken back.

Knows: how many owners each block has, and which blocks to reuse first. Does not know: what a
block holds, who its owners are, tensors. One thread at a time.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from kvbook.errors import BlockNotInUseError, OutOfBlocksError

LISTS = (list, tuple, range)  # what can be gone through twice
MOST = 2**31 - 1  # blocks and tokens of a block: what a 32-bit block table can name


class BlockPool:
    """``blocks`` blocks of ``block_size`` tokens each, named 0 … ``blocks - 1``.

    A block is in one of three states, and the three counts always add up to ``blocks``:

    - *free*: no owner, and nothing worth keeping,
    - *evictable*: no owner, but what it holds can still be found, until the block is needed,
    - *in use*: one owner or more.

    Free blocks are lent first, then the evictable block that has had no owner for longest.

    >>> pool = BlockPool(blocks=4, block_size=16)
    >>> table = pool.allocate(3)
    >>> table, pool.free, pool.in_use
    ([0, 1, 2], 1, 3)
    >>> pool.share(table[:1])  # a second owner of block 0
    >>> pool.release(table)
    >>> pool.free, pool.in_use, pool.owners(0)
    (3, 1, 1)
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        for name, value in (("blocks", blocks), ("block_size", block_size)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
            if value > MOST:
                raise ValueError(f"{name} must be at most {MOST}, got {value}; make a smaller pool")
        self.blocks, self.block_size = blocks, block_size
        self._free = list(range(blocks))[::-1]  # a stack: block 0 is on top
        self._evictable: OrderedDict[int, None] = OrderedDict()  # longest without owner first
        self._owners = [0] * blocks
        self._kept: dict[int, Callable[[int], None]] = {}  # block → whom to tell of its reuse
        self._claimed = False  # whether a cache's storage stands behind these blocks

    @property
    def free(self) -> int:
        """Blocks without an owner that hold nothing worth keeping."""
        return len(self._free)

    @property
    def evictable(self) -> int:
        """Blocks without an owner whose content can still be found."""
        return len(self._evictable)

    @property
    def in_use(self) -> int:
        """Blocks with at least one owner."""
        return self.blocks - self.available

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` can lend now: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    def owners(self, block: int) -> int:
        """Owners of a block; 0 when it is free or evictable. ``ValueError`` if there is none."""
        if type(block) is not int or not 0 <= block < self.blocks:
            raise self._not_in_use(block)
        return self._owners[block]

    def allocate(self, n: int) -> list[int]:
        """Lend n blocks, each to one owner.

        Evicts only what it needs. Raises ``OutOfBlocksError`` if fewer than n are available;
        nothing has changed then.
        """
        if type(n) is not int or n < 1:
            raise ValueError(f"allocate() takes a positive number of blocks, got {n!r}")
        free, owners = self._free, self._owners
        if n > len(free) + len(self._evictable):
            raise OutOfBlocksError(
                f"{counted(n, 'block')} {'is' if n == 1 else 'are'} needed, but "
                f"{self.available} of {self.blocks} are available; release blocks first, or make "
                "a larger pool"
            )
        taken = free[: -n - 1 : -1]  # from the top of the stack, n of them or all
        del free[-n:]
        if len(taken) < n:
            taken += self._evict(n - len(taken))
        for block in taken:
            owners[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add one owner to each block, which must be in use or evictable.

        Who shares a block of a sequence shares all blocks before it too: see ``release``.
        """
        if not isinstance(blocks, LISTS):
            raise not_a_list(blocks)
        owners, evictable = self._owners, self._evictable
        for block in blocks:
            if type(block) is not int or not 0 <= block < self.blocks:
                raise self._not_in_use(block)
            if not owners[block] and block not in evictable:
                raise BlockNotInUseError(
                    f"block {block} is free and holds nothing to share; allocate() it instead"
                )
        for block in blocks:
            if not owners[block]:
                del evictable[block]
            owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one owner from each block; without one it is free, or evictable if it is kept.

        ``blocks`` are in the order of the sequence, and the last one is let go first. A block is
        of use only to those who hold what comes before it. So as long as every owner holds a
        sequence from its first block on, no block is evicted before one that depends on it.
        """
        if not isinstance(blocks, LISTS):
            raise not_a_list(blocks)
        owners = self._owners
        for block in blocks:
            if type(block) is not int or not 0 <= block < self.blocks or not owners[block]:
                raise self._not_in_use(block)
        if len(blocks) > 1 and len(set(blocks)) < len(blocks):
            self._check_repeats(blocks)
        for block in reversed(blocks):
            owners[block] = left = owners[block] - 1
            if left:
                continue
            if block in self._kept:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def keep(self, blocks: Sequence[int], forget: Callable[[int], None]) -> None:
        """What these blocks in use hold is final and can be found: evict them, do not free them.

        ``forget(block)`` is called once: when a block is about to be lent for something else, or
        is dropped.
        """
        if not isinstance(blocks, LISTS):
            raise not_a_list(blocks)
        if not callable(forget):
            raise ValueError(f"forget must be a function of a block, got {forget!r:.60}")
        owners, kept = self._owners, self._kept
        for block in blocks:
            if type(block) is not int or not 0 <= block < self.blocks or not owners[block]:
                raise self._not_in_use(block)
            if block in kept:
                raise ValueError(f"block {block} is kept already; keep it once, when it is full")
        kept.update(dict.fromkeys(blocks, forget))

    def drop(self, blocks: Sequence[int]) -> None:
        """What these kept blocks hold is of no use any more: the opposite of ``keep``.

        Evictable ones become free; those in use stay with their owners, and are free after them.
        The ``forget`` of ``keep`` is called for each.
        """
        if not isinstance(blocks, LISTS):
            raise not_a_list(blocks)
        for block in blocks:
            if type(block) is not int or block not in self._kept:
                raise ValueError(f"block {block!r} is not kept; drop() takes what keep() was given")
        if len(set(blocks)) < len(blocks):
            twice = next(block for block, times in Counter(blocks).items() if times > 1)
            raise ValueError(f"block {twice} is given twice; drop() each block once")
        for block in blocks:
            if block in self._evictable:
                del self._evictable[block]
                self._free.append(block)
            self._kept.pop(block)(block)

    def kept(self, block: int) -> bool:
        """Whether what this block holds is final and can be found."""
        if type(block) is not int or not 0 <= block < self.blocks:
            raise self._not_in_use(block)
        return block in self._kept

    def writable(self, block: int) -> bool:
        """Whether writing into this block in use disturbs nobody: one owner, and not kept."""
        if not self.owners(block):
            raise self._not_in_use(block)
        return self._owners[block] == 1 and block not in self._kept

    def copy_on_write(self, block: int) -> int:
        """The block that this owner may write into: the same one if it is writable, else another.

        In the second case one owner has moved from ``block`` to the new block, and the caller
        copies the content. Raises ``OutOfBlocksError`` if none is available; nothing has changed
        then.
        """
        if self.writable(block):
            return block
        [copy] = self.allocate(1)
        self.release([block])
        return copy

    def check_unclaimed(self) -> None:
        """Raise ``ValueError`` if a cache's storage stands behind these blocks already."""
        if self._claimed:
            raise ValueError(
                "the pool's blocks are slots of another cache's storage, so their numbers would "
                "mean two things; make a BlockPool for each cache, and a PrefixCache for each pool"
            )

    def claim(self) -> None:
        """From now on a block is a place in one cache's storage, and in no other's."""
        self.check_unclaimed()
        self._claimed = True

    def _not_in_use(self, block: int) -> BlockNotInUseError:
        if type(block) is not int or not 0 <= block < self.blocks:
            return BlockNotInUseError(
                f"there is no block {block!r}; the pool's blocks are 0 to {self.blocks - 1}"
            )
        return BlockNotInUseError(
            f"block {block} has no owner; allocate() or share() it first, and release() it once "
            "for each of these"
        )

    def _check_repeats(self, blocks: Sequence[int]) -> None:
        for block, times in Counter(blocks).items():
            if times > self._owners[block]:
                raise BlockNotInUseError(
                    f"block {block} has {counted(self._owners[block], 'owner')} and cannot be "
                    f"released {times} times; release() it once for each allocate() and share()"
                )

    def _evict(self, n: int) -> list[int]:
        evicted = [self._evictable.popitem(last=False)[0] for _ in range(n)]
        for block in evicted:
            self._kept.pop(block)(block)
        return evicted


def counted(n: int, noun: str) -> str:
    """How many, in words that fit: 1 block, 2 blocks."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def not_a_list(blocks: object) -> ValueError:
    return ValueError(f"blocks must be a list of block numbers, got {blocks!r:.60}")
