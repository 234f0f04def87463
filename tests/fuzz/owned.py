"""Sequences that own their blocks, bound to rows from step to step, in any order.

What a sequence reads is said by its own text, whoever has filled its blocks and whichever row it
stood in. ``Bound`` is for tables that the test fills by hand; ``prefixed`` for a prefix cache.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fuzz import refusals_owned
from fuzz.case import Case, Op
from fuzz.machine import COPIES, UNFINISHED, VALUES, Given, Machine, fitted
from fuzz.tally import Tally
from fuzz.watch import close, identical, refused, same, state_of, unchanged
from fuzz.written_out import Text
from kvbook.cache import BlockTable, KVCache
from kvbook.errors import OutOfBlocksError


@dataclass(eq=False)
class Live:
    """A sequence: all of its tokens, and those whose keys and values are in its blocks."""

    tokens: list[int]
    text: Text
    tables: list[Any]  # one for each group of layers
    pure: bool = True  # whether all of the text was computed with the present weights
    more: dict[str, Any] = field(default_factory=dict)  # what an owner notes

    @property
    def computed(self) -> int:
        return len(self.text.tokens)

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.computed :]


class Owned(Machine):
    """``live`` are the sequences, ``bound`` those that are the batch now."""

    def __init__(self, case: Case, tally: Tally) -> None:
        super().__init__(case, tally)
        self.size = case.sizes["block"]
        self.pools = [pool for group in self.cache.groups for pool in group.placement.pools]
        self.live: list[Live] = []
        self.bound: list[Live] = []
        self.lengths: list[int] = []  # what the cache must say

    def pick(self, which: int) -> Live | None:
        return self.live[which % len(self.live)] if self.live else None

    def chosen(self, which: Sequence[int]) -> list[Live]:
        """These sequences in this order, each once."""
        found = [self.live[i % len(self.live)] for i in which] if self.live else []
        return list(dict.fromkeys(found))

    def bind(self, batch: list[Live]) -> None:
        by_group = zip(*(one.tables for one in batch), strict=True)
        self.lengths = [one.computed for one in batch]
        self.cache.bind(*map(list, by_group), lengths=self.lengths)
        self.bound = batch

    def let_go(self, one: Live) -> None:
        """The sequence is no more; the cache may still be bound to it."""
        self.live.remove(one)
        self.bound = [] if one in self.bound else self.bound

    def check(self) -> None:
        same("lengths", self.cache.lengths, tuple(self.lengths))
        for row, one in enumerate(self.bound):
            for layer in range(self.layers):
                found = self.cache.entries(layer, row)
                for name, a, b in zip(("keys", "values"), found, one.text.entries(layer),
                                      strict=True):
                    close(f"{name} of layer {layer}, row {row}", a, b)
        self.check_pools()

    def check_pools(self) -> None:
        """By default the blocks in use are those of the tables."""
        for group, pool in enumerate(self.pools):
            tables = [one.tables[group].blocks for one in self.live]
            same("blocks in use", pool.in_use, len({b for table in tables for b in table}))
            for one, table in zip(self.live, tables, strict=True):
                same("blocks of a table", len(set(table)), len(table))
                room = len(table) * self.size
                same("room in a table", room >= len(one.tokens), True)

    def may_write(self, batch: list[Live], counts: list[int]) -> bool:
        """Whether nobody else reads what these rows would write."""
        return True

    def ran(self, one: Live, commit: bool) -> None:
        """The sequence has computed more of its tokens."""

    # ---- Forward passes

    def do_run(self, which: list[int], amounts: list[int], more: int, commit: bool, seed: int
               ) -> None:
        """Bind some sequences and compute some of what each waits for."""
        batch = self.chosen(which)
        if not batch:
            return
        counts = self.counts_of(batch, amounts)
        T = max(1, *counts) + more
        tokens = self.padded(batch, counts, T, seed)
        self.bind(batch)
        if not self.may_write(batch, counts):
            self.tally.refused["a write into what others read"] += 1
            refused("a write into what others read", lambda: self.forward(tokens, counts),
                    self.cache)
            return
        self.cache.check_room(counts)
        self.judge_all(batch, tokens, counts, self.forward(tokens, counts), seed)
        for one in batch:
            self.ran(one, commit)

    def counts_of(self, batch: list[Live], amounts: list[int]) -> list[int]:
        wanted = fitted(amounts, len(batch))
        limit = self.model.config.max_positions
        return [
            min(n, len(one.pending), limit - one.computed)
            for one, n in zip(batch, wanted, strict=True)
        ]

    def padded(self, batch: list[Live], counts: list[int], T: int, seed: int) -> list[list[int]]:
        """Anything may stand on the left of what is new."""
        rows = self.random_tokens(seed, len(batch), T)
        return [
            row[: T - count] + one.pending[:count]
            for row, one, count in zip(rows, batch, counts, strict=True)
        ]

    def judge_all(self, batch: list[Live], tokens: list[list[int]], counts: list[int],
                  logits: Tensor, turn: int) -> None:
        T = logits.shape[1]
        for row, (one, count) in enumerate(zip(batch, counts, strict=True)):
            self.judge(f"logits of row {row}", one.text, tokens[row][T - count :],
                       logits[row, T - count :], turn + row, one.pure)
        self.lengths = [one.computed for one in batch]

    def do_fail(self, which: list[int], amounts: list[int], layer: int, late: bool, way: str,
                seed: int) -> None:
        """A forward pass that fails, a use that is refused, and the way back."""
        batch, layer = self.chosen(which), layer % self.layers
        counts = self.counts_of(batch, amounts) if batch else []
        if not batch or not self.may_write(batch, counts):
            return
        T = max(1, *counts)
        tokens = self.padded(batch, counts, T, seed)
        self.bind(batch)
        self.crash(tokens, counts, layer, late)
        if layer < self.layers - 1 or not late:
            refused("a step in an unfinished step", lambda: self.forward(tokens, counts),
                    self.cache, UNFINISHED)
        if way == "bind":
            self.bind(batch)
        elif way == "truncate":
            self.cache.truncate(self.lengths)
        else:
            self.unbind()

    def unbind(self) -> None:
        self.cache.reset()
        self.bound, self.lengths = [], []

    def do_overwrite(self, which: int, twice: bool) -> None:
        """Rows that would write into one block both, or into what others read or can find."""
        one = self.pick(which)
        if one is None or not (twice or self.is_final(one)):
            return
        batch = [one, one] if twice else [one]
        self.bind(batch)
        if not twice:
            self.cache.truncate(0)
        self.tally.refused["two rows in one block" if twice else "a block that is final"] += 1
        refused("a write into a block that is not a row's own",
                lambda: self.forward([[0]] * len(batch), [1] * len(batch)), self.cache)
        self.unbind()

    def is_final(self, one: Live) -> bool:
        """Whether others read the first block of a sequence, or can find it."""
        block = one.tables[0].blocks[0]
        return sum(block in other.tables[0].blocks for other in self.live) > 1

    def do_rest(self) -> None:
        """No sequence is the batch."""
        self.unbind()

    def do_poison(self, value: str) -> None:
        self.cache.fill_unused(VALUES[value])

    def whole(self) -> tuple[Any, ...]:
        """Everything that belongs together: copied as one."""
        return self.cache, [one.tables for one in self.live]

    def adopt(self, whole: tuple[Any, ...]) -> None:
        self.cache, tables = whole[:2]
        self.pools = [pool for group in self.cache.groups for pool in group.placement.pools]
        for one, of_groups in zip(self.live, tables, strict=True):
            one.tables = of_groups

    def do_copy(self, how: str, keep: bool, seed: int) -> None:
        """Cache, pools and tables copied together go on alike, to the bit, and then apart."""
        batch = self.chosen(range(len(self.live)))
        counts = self.counts_of(batch, [1]) if batch else []
        original = self.whole()
        other = COPIES[how](original)
        same("state of a copy", state_of(other[0])[0], state_of(original[0])[0])
        if batch and self.may_write(batch, counts):
            tokens = self.padded(batch, counts, 2, seed)
            logits = []
            for whole in (original, other):
                self.adopt(whole)
                self.bind(batch)
                logits.append(self.forward(tokens, counts))
            identical("logits of a copy", real(logits[1], counts), real(logits[0], counts))
            self.judge_all(batch, tokens, counts, logits[0], seed)
        dropped = other if keep else original
        self.adopt(original if keep else other)
        before = state_of(self.cache)
        spoil(dropped[0])
        unchanged(self.cache, before, "what was done to a copy")

    def do_refuse(self, what: str, seed: int) -> None:
        call = refusals_owned.OF_OWNED[what]
        if not self.live and what not in refusals_owned.WITHOUT_SEQUENCES:
            return
        self.tally.refused[what] += 1
        refused(what, lambda: call(self, seed), self.cache)

    # ---- What is drawn

    def draw(self, rnd: random.Random) -> Op:
        weights = dict(self.WEIGHTS)
        if not self.live:
            weights["come"] = 200
        if len(self.live) > 4:
            weights["go"] = 20
        name = rnd.choices(list(weights), list(weights.values()))[0]
        return Op(name, getattr(self, "draw_" + name)(rnd))

    def draw_which(self, rnd: random.Random) -> Given:
        return {"which": rnd.randrange(max(1, len(self.live)))}

    def draw_run(self, rnd: random.Random) -> Given:
        n = max(1, len(self.live))
        most = rnd.choice([1, 1, 2, 4, 20])
        return {
            "which": rnd.sample(range(n), rnd.randint(1, min(n, 4))),
            "amounts": [rnd.randint(0, most) for _ in range(n)],
            "more": rnd.choice([0, 0, 1]),
            "commit": rnd.random() < 0.7,
            "seed": rnd.randrange(1000),
        }

    def draw_fail(self, rnd: random.Random) -> Given:
        run = self.draw_run(rnd)
        return {
            "which": run["which"], "amounts": run["amounts"], "layer": rnd.randrange(self.layers),
            "late": rnd.random() < 0.5, "way": rnd.choice(["bind", "truncate", "reset"]),
            "seed": run["seed"],
        }  # fmt: skip

    def draw_overwrite(self, rnd: random.Random) -> Given:
        return {**self.draw_which(rnd), "twice": rnd.random() < 0.3}

    def draw_rest(self, rnd: random.Random) -> Given:
        return {}

    def draw_poison(self, rnd: random.Random) -> Given:
        return {"value": rnd.choice(["not a number", "not a number", "large", "infinity"])}

    def draw_copy(self, rnd: random.Random) -> Given:
        return {
            "how": rnd.choice(list(COPIES)), "keep": rnd.random() < 0.5,
            "seed": rnd.randrange(1000),
        }  # fmt: skip

    def draw_refuse(self, rnd: random.Random) -> Given:
        return {"what": rnd.choice(list(refusals_owned.OF_OWNED)), "seed": rnd.randrange(1000)}


def real(logits: Tensor, counts: list[int]) -> Tensor:
    """Those of tokens, without the padding."""
    T = logits.shape[1]
    return torch.cat([logits[row, T - count :] for row, count in enumerate(counts)])


def spoil(cache: KVCache) -> None:
    """All that is in a cache that nobody uses any more."""
    cache.reset()
    for tensor in cache.tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


class Bound(Owned):
    """Blocks are allocated, shared and released by hand."""

    WEIGHTS: ClassVar[dict[str, int]] = {
        "come": 8, "grow": 10, "run": 28, "fork": 9, "drop_back": 8, "go": 4, "fail": 6,
        "rest": 4, "overwrite": 5, "poison": 8, "copy": 4, "refuse": 8,
    }  # fmt: skip

    def allocated(self, blocks: int) -> list[list[int]] | None:
        """So many blocks of every pool; ``None`` if one has too few, which it must say."""
        free = min(
            pool.blocks - len({b for one in self.live for b in one.tables[group].blocks})
            for group, pool in enumerate(self.pools)
        )
        if blocks == 0:
            return [[] for _ in self.pools]
        if blocks <= free:
            return [pool.allocate(blocks) for pool in self.pools]
        self.tally.refused["no blocks"] += 1
        refused("blocks that are not there", lambda: self.pools[0].allocate(blocks), self.cache,
                OutOfBlocksError)
        return None

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def do_come(self, n: int, seed: int) -> None:
        new = self.allocated(self.blocks_for(n))
        if new is not None:
            [tokens] = self.random_tokens(seed, 1, n)
            tables = [BlockTable(*pair) for pair in zip(self.pools, new, strict=True)]
            self.live.append(Live(tokens, self.new_text(), tables))

    def do_grow(self, which: int, n: int, seed: int) -> None:
        one = self.pick(which)
        if one is None:
            return
        length = len(one.tokens) + n
        missing = self.blocks_for(length) - len(one.tables[0].blocks)
        new = self.allocated(max(0, missing))
        if new is not None:
            one.tokens += self.random_tokens(seed, 1, n)[0]
            for table, blocks in zip(one.tables, new, strict=True):
                table.blocks += blocks

    def do_fork(self, which: int, blocks: int, n: int, seed: int) -> None:
        """Another sequence that shares full blocks, and goes on by itself."""
        one = self.pick(which)
        if one is None:
            return
        shared = min(blocks, one.computed // self.size)
        [tokens] = self.random_tokens(seed, 1, n)
        new = self.allocated(self.blocks_for(n))
        if new is None:
            return
        text = one.text.fork()
        text.go_back_to(shared * self.size)
        tables = []
        for table, own in zip(one.tables, new, strict=True):
            table.pool.share(table.blocks[:shared])
            tables.append(BlockTable(table.pool, table.blocks[:shared] + own))
        self.tally.sequences += 1
        self.live.append(Live([*text.tokens, *tokens], text, tables))

    def do_drop_back(self, which: int, back: int) -> None:
        """A sequence takes back its last tokens; its blocks stay."""
        one = self.pick(which)
        if one is None:
            return
        self.bind([one])
        n = max(0, one.computed - back)
        self.cache.truncate([n])
        one.text.go_back_to(n)
        del one.tokens[n:]
        self.lengths = [n]

    def do_go(self, which: int) -> None:
        one = self.pick(which)
        if one is None:
            return
        for table in one.tables:
            table.pool.release(table.blocks)
            table.blocks.clear()
        self.let_go(one)

    def may_write(self, batch: list[Live], counts: list[int]) -> bool:
        tables = [one.tables[0].blocks for one in self.live]
        for one, count in zip(batch, counts, strict=True):
            start, end = one.computed, one.computed + count
            if end > start:
                written = one.tables[0].blocks[start // self.size : self.blocks_for(end)]
                if any(sum(block in table for table in tables) > 1 for block in written):
                    return False
        return True

    def draw_come(self, rnd: random.Random) -> Given:
        return {"n": rnd.randint(1, 9), "seed": rnd.randrange(1000)}

    def draw_grow(self, rnd: random.Random) -> Given:
        return {**self.draw_which(rnd), "n": rnd.choice([1, 1, 2, 5]), "seed": rnd.randrange(1000)}

    def draw_fork(self, rnd: random.Random) -> Given:
        return {
            **self.draw_which(rnd), "blocks": rnd.randint(0, 4), "n": rnd.randint(1, 5),
            "seed": rnd.randrange(1000),
        }  # fmt: skip

    def draw_drop_back(self, rnd: random.Random) -> Given:
        return {**self.draw_which(rnd), "back": rnd.choice([0, 1, 2, 5])}

    def draw_go(self, rnd: random.Random) -> Given:
        return self.draw_which(rnd)
