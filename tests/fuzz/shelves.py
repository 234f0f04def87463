"""Who must own how many blocks, without their numbers: two plain models of a pool.

``Tables`` is what rows with tables of their own take from a pool; ``Shelf`` is what a prefix cache
finds, keeps and lets go. Neither knows tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

Table = list[object]  # a block is an object; two tables share it if both hold the same one


class Tables:
    """Tables that grow with their rows, are shared by forks and copied where one writes."""

    def __init__(self, rows: int, blocks: int, size: int) -> None:
        self.rows, self.blocks, self.size = rows, blocks, size
        self.tables: list[Table] = [[] for _ in range(rows)]

    def grown(self, starts: Sequence[int], ends: Sequence[int]) -> list[Table]:
        tables = [list(table) for table in self.tables]
        for table, start, end in zip(tables, starts, ends, strict=False):
            place, offset = divmod(start, self.size)
            if end > start and offset and sum(table[place] in one for one in tables) > 1:
                table[place] = object()
            table += [object() for _ in range(-(-end // self.size) - len(table))]
        return tables

    def has_room(self, starts: Sequence[int], ends: Sequence[int]) -> bool:
        return in_use(self.grown(starts, ends)) <= self.blocks

    def step(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        self.tables = self.grown(starts, ends)

    def truncate(self, lengths: Sequence[int]) -> None:
        for table, length in zip(self.tables, lengths, strict=False):
            del table[-(-length // self.size) :]

    def select(self, rows: Sequence[int]) -> None:
        chosen = [list(self.tables[row]) for row in rows]
        self.tables = chosen + [[] for _ in range(self.rows - len(chosen))]


def in_use(tables: Sequence[Table]) -> int:
    return len({id(block) for table in tables for block in table})


Prefix = tuple[int, object, tuple[int, ...]]  # weights, salt, all tokens up to a block's end


@dataclass
class Holding:
    """The blocks of one sequence: those that can be found by a prefix come first."""

    weights: int
    salt: object
    named: list[Prefix] = field(default_factory=list)
    others: int = 0

    @property
    def blocks(self) -> int:
        return len(self.named) + self.others


class Shelf:
    """A pool of ``blocks``, and the prefixes that can be found in it."""

    def __init__(self, blocks: int, size: int) -> None:
        self.size, self.free, self.weights = size, blocks, 0
        self.owners: dict[Prefix, int] = {}
        self.findable: set[Prefix] = set()
        self.idle: list[Prefix] = []  # without an owner: the longest so comes first

    def begin(self, salt: object, tokens: Sequence[int]) -> Holding | None:
        """``None`` if there is no room. Never all of a prompt is found."""
        holding = Holding(self.weights, salt)
        for end in range(self.size, len(tokens), self.size):
            prefix = (self.weights, salt, tuple(tokens[:end]))
            if prefix not in self.findable:
                break
            holding.named.append(prefix)
        missing = self._blocks(len(tokens)) - len(holding.named)
        if missing > self.free + len([p for p in self.idle if p not in holding.named]):
            return None
        for prefix in holding.named:
            self._share(prefix)
        self._take(missing)
        holding.others = missing
        return holding

    def grow(self, holding: Holding, length: int) -> bool:
        """Blocks for so many tokens; whether there is room for them."""
        missing = self._blocks(length) - holding.blocks
        if missing > self.free + len(self.idle):
            return False
        if missing > 0:
            self._take(missing)
            holding.others += missing
        return True

    def commit(self, holding: Holding, tokens: Sequence[int]) -> None:
        """These tokens are written. A block that is there already takes the place of a second."""
        if holding.weights != self.weights:
            return
        for end in range(self.size * (len(holding.named) + 1), len(tokens) + 1, self.size):
            prefix = (self.weights, holding.salt, tuple(tokens[:end]))
            if prefix in self.findable:
                self._share(prefix)
                self.free += 1
            else:
                self.owners[prefix] = 1
                self.findable.add(prefix)
            holding.named.append(prefix)
            holding.others -= 1

    def retract(self, holding: Holding, length: int) -> None:
        gone = holding.blocks - self._blocks(length)
        holding.others -= gone
        self.free += gone

    def end(self, holding: Holding) -> None:
        self.free += holding.others
        for prefix in reversed(holding.named):
            self.owners[prefix] -= 1
            if self.owners[prefix] == 0:
                if prefix in self.findable:
                    self.idle.append(prefix)
                else:
                    self.free += 1

    def clear(self) -> None:
        self.free += len(self.idle)
        self.idle, self.findable = [], set()
        self.weights += 1

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _share(self, prefix: Prefix) -> None:
        if prefix in self.idle:
            self.idle.remove(prefix)
        self.owners[prefix] += 1

    def _take(self, n: int) -> None:
        """Free ones first, then those that nobody has owned for longest."""
        evicted = max(0, n - self.free)
        self.free -= n - evicted
        self.findable -= set(self.idle[:evicted])
        del self.idle[:evicted]
