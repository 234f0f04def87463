"""Sequences of a prefix cache over a small pool: hits, evictions, drafts, new weights.

What must be found, evicted and kept is said by ``Shelf``. With weak keys less is found, and
nothing wrong: then only the logits are compared, and how many blocks are owned.
"""

import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from fuzz.case import Case
from fuzz.kinds import prefix_over
from fuzz.machine import Given
from fuzz.models import build
from fuzz.owned import Live, Owned
from fuzz.shelves import Holding, Shelf
from fuzz.tally import Tally
from fuzz.watch import expect, refused, same
from kvbook.cache.block_key import Identity
from kvbook.cache.prefix import PrefixCache
from kvbook.errors import CacheFullError, OutOfBlocksError
from kvbook.generate import generate_with_prefix, stream_with_prefix


@dataclass(eq=False)
class Stream:
    """One that is under way, and what it must yield."""

    found: Generator[int, None, None]
    expected: Generator[int, None, None]
    holds: list[int]  # blocks that it owns now, by the plain model


class Prefixed(Owned):
    """Sequences are begun, grown, committed, taken back and ended by a ``PrefixCache``."""

    WEIGHTS: ClassVar[dict[str, int]] = {
        "come": 14, "grow": 9, "run": 26, "commit": 4, "retract": 6, "go": 8, "preempt": 5,
        "clear": 3, "serve": 6, "stream": 3, "next": 8, "close": 5, "fail": 5, "rest": 4,
        "overwrite": 4, "poison": 8, "copy": 3, "refuse": 6,
    }  # fmt: skip

    def __init__(self, case: Case, tally: Tally) -> None:
        super().__init__(case, tally)
        self.prefix: PrefixCache = prefix_over(self.cache, case.placed)
        self.exact = case.placed == "prefix"  # whether the model says what is found
        self.shelf = Shelf(case.sizes["blocks"], self.size)
        self.streams: list[Stream] = []
        self.stats = [0, 0]

    def check_pools(self) -> None:
        [pool] = self.pools
        if not self.streams:
            super().check_pools()
        if self.exact:
            same("free and evictable blocks", (pool.free, pool.evictable),
                 (self.shelf.free, len(self.shelf.idle)))
            same("blocks that can be found", self.prefix.cached_blocks, len(self.shelf.findable))
            same("prompts counted", [self.prefix.stats.prompts, self.prefix.stats.cached_tokens],
                 self.stats)
        for one in self.live:
            sequence = one.tables[0]
            same("tokens of a sequence", sequence.tokens.tolist(), one.tokens)
            expect(sequence.written <= one.computed, "more is written than was computed")

    def is_final(self, one: Live) -> bool:
        named = one.more["holding"].named if self.exact else []
        return super().is_final(one) or (named != [] and named[0] in self.shelf.findable)

    def prompt(self, base: int, n: int, own: int, seed: int) -> list[int]:
        """The beginning of one of a few texts, and tokens of its own."""
        return self.random_tokens(base, 1, n)[0] + self.random_tokens(seed, 1, own)[0]

    # ---- Sequences

    def do_come(self, base: int, n: int, own: int, salt: int, seed: int) -> None:
        self.begin(self.prompt(base, n, own, seed), salt, resumed=False)

    def begin(self, tokens: list[int], salt: int, resumed: bool) -> None:
        holding = self.shelf.begin(salt, tokens) if self.exact else None

        def begin() -> Any:
            return self.prefix.begin(tokens, Identity(salt=salt), resumed=resumed)

        if self.exact and holding is None:
            self.tally.refused["no blocks to begin"] += 1
            refused("begin() without blocks", begin, self.cache, OutOfBlocksError)
            return
        try:
            sequence = begin()
        except OutOfBlocksError:
            if self.exact:
                raise
            return
        found = sequence.cached_tokens
        if holding is not None:
            same("tokens that are found", found, len(holding.named) * self.size)
        expect(found % self.size == 0 and found < len(tokens), f"{found} tokens were found")
        text = self.new_text()
        text.step(self.built.weights, tokens[:found])  # as a run of its own would have it
        self.live.append(Live(tokens, text, [sequence], more={"holding": holding, "salt": salt}))
        if not resumed:
            self.stats = [self.stats[0] + 1, self.stats[1] + found]

    def do_grow(self, which: int, n: int, seed: int) -> None:
        one = self.pick(which)
        if one is None:
            return
        [new] = self.random_tokens(seed, 1, n)

        def append() -> None:
            self.prefix.append(one.tables[0], new)

        if self.exact and not self.shelf.grow(one.more["holding"], len(one.tokens) + n):
            self.tally.refused["no blocks to append"] += 1
            refused("append() without blocks", append, self.cache, OutOfBlocksError)
            return
        try:
            append()
        except OutOfBlocksError:
            if self.exact:
                raise
            return
        one.tokens = one.tokens + new

    def ran(self, one: Live, commit: bool) -> None:
        if commit:
            self.commit(one, one.computed)

    def do_commit(self, which: int, back: int) -> None:
        """All but the last few of the tokens that are computed."""
        one = self.pick(which)
        if one is not None:
            self.commit(one, max(one.tables[0].written, one.computed - back))

    def commit(self, one: Live, length: int) -> None:
        before = list(one.tables[0].blocks)
        swapped = self.prefix.commit(one.tables[0], length)
        after = one.tables[0].blocks
        same("places that commit() names", swapped,
             [place for place, block in enumerate(before) if after[place] != block])
        if self.exact:
            self.shelf.commit(one.more["holding"], one.tokens[:length])

    def do_retract(self, which: int, back: int) -> None:
        """Drafts are rejected, computed or not."""
        one = self.pick(which)
        if one is None:
            return
        length = max(1, one.tables[0].written, len(one.tokens) - back)
        self.prefix.retract(one.tables[0], length)
        one.tokens = one.tokens[:length]
        if one.computed > length:
            one.text.go_back_to(length)
            if one in self.bound:
                self.unbind()
        if self.exact:
            self.shelf.retract(one.more["holding"], length)

    def do_go(self, which: int) -> None:
        one = self.pick(which)
        if one is None:
            return
        self.prefix.end(one.tables[0])
        if self.exact:
            self.shelf.end(one.more["holding"])
        self.let_go(one)

    def do_preempt(self, which: int) -> None:
        """Its blocks are given back, and it begins again."""
        one = self.pick(which)
        if one is not None:
            self.do_go(which)
            self.begin(one.tokens, one.more["salt"], resumed=True)

    def do_clear(self, seed: int) -> None:
        """Other weights, and nothing that the old ones computed may be found."""
        self.close_all()
        self.prefix.clear()
        self.shelf.clear()
        self.built = build(self.case.family, self.case.config, 10 + seed)
        self.model = self.built.model
        for one in self.live:
            one.pure = False

    # ---- Generation

    def expected(self, tokens: list[int], salt: int, new: int, holds: list[int]
                 ) -> Generator[int, None, None]:
        """What a stream must yield; ``OutOfBlocksError`` where it must say so."""
        holding = self.shelf.begin(salt, tokens) if self.exact else Holding(0, salt)
        if holding is None:
            raise OutOfBlocksError
        if self.exact:
            self.stats = [self.stats[0] + 1, self.stats[1] + len(holding.named) * self.size]
        text, tokens = self.new_text(), list(tokens)
        try:
            for step in range(new):
                logits = text.step(self.built.weights, tokens[len(text.tokens) :])
                if self.exact:
                    self.shelf.commit(holding, tokens)
                holds[:] = [len(tokens)]
                yield int(logits[-1].argmax())
                if step < new - 1:
                    if self.exact and not self.shelf.grow(holding, len(tokens) + 1):
                        raise OutOfBlocksError
                    tokens.append(int(logits[-1].argmax()))
        finally:
            if self.exact:
                self.shelf.end(holding)

    def do_serve(self, base: int, n: int, own: int, salt: int, new: int, stop: int, seed: int
                 ) -> None:
        """``generate_with_prefix``, with the token of step ``stop`` as one that ends it."""
        tokens = self.prompt(base, n, own, seed)
        drafts = self.cold(tokens, new)
        ends = {drafts[stop]} if stop < new else set()

        def serve() -> list[int]:
            return generate_with_prefix(
                self.model, tokens, new, self.cache, self.prefix, stop_tokens=ends,
                identity=Identity(salt=salt),
            )  # fmt: skip

        if len(tokens) + new - 1 > self.model.config.max_positions:
            self.tally.refused["a prompt too long to serve"] += 1
            refused("a prompt too long to serve", serve, self.cache, CacheFullError)
            return
        answer = list[int]()
        expected = self.expected(tokens, salt, new, [])
        try:
            for token in expected:
                if token in ends:
                    break
                answer.append(token)
            expected.close()
        except OutOfBlocksError:
            self.tally.refused["no blocks to serve"] += 1
            answer = [-1]
        self.bound, self.lengths = [], []
        try:
            found = serve()
        except OutOfBlocksError:
            found = [-1]
        if self.exact or found != [-1]:
            same("served tokens", found, answer)
        if found == [-1] and self.cache.lengths:
            self.unbind()  # begin() itself was refused: the batch is as it was

    def cold(self, tokens: list[int], new: int) -> list[int]:
        text, fed, drawn = self.new_text(), tokens, list[int]()
        for _ in range(new):
            drawn.append(int(text.step(self.built.weights, fed)[-1].argmax()))
            fed = drawn[-1:]
        return drawn

    def do_stream(self, base: int, n: int, own: int, salt: int, new: int, seed: int) -> None:
        """One more stream; it takes nothing before its first token is asked for."""
        tokens = self.prompt(base, n, own, seed)
        if len(tokens) + new - 1 > self.model.config.max_positions or len(self.streams) > 2:
            return
        found = stream_with_prefix(
            self.model, tokens, new, self.cache, self.prefix, identity=Identity(salt=salt)
        )
        holds: list[int] = []
        self.streams.append(Stream(found, self.expected(tokens, salt, new, holds), holds))

    def do_next(self, which: int) -> None:
        """One token of a stream, while others wait."""
        if not self.streams:
            return
        stream = self.streams[which % len(self.streams)]
        began = bool(stream.holds)
        expected = outcome(stream.expected)
        found = outcome(stream.found)
        if found == expected and isinstance(found, int):
            self.bound, self.lengths = [], list(stream.holds)
            return
        if self.exact or found is not OutOfBlocksError:
            same("what a stream yields", found, expected)
        stream.expected.close()
        self.streams.remove(stream)
        if began or found is StopIteration:
            self.bound, self.lengths = [], []

    def do_close(self, which: int) -> None:
        if self.streams:
            stream = self.streams.pop(which % len(self.streams))
            self.shut(stream)

    def shut(self, stream: Stream) -> None:
        stream.found.close()
        stream.expected.close()
        if stream.holds:  # it has begun, so it lets go of the batch
            self.bound, self.lengths = [], []

    def close_all(self) -> None:
        for stream in self.streams:
            self.shut(stream)
        self.streams = []

    # ---- Copies

    def whole(self) -> tuple[Any, ...]:
        return self.cache, [one.tables for one in self.live], self.prefix

    def adopt(self, whole: tuple[Any, ...]) -> None:
        super().adopt(whole)
        self.prefix = whole[2]

    def do_copy(self, how: str, keep: bool, seed: int) -> None:
        self.close_all()  # a generator cannot be copied
        super().do_copy(how, keep, seed)

    # ---- What is drawn

    def draw_come(self, rnd: random.Random) -> Given:
        return {
            "base": rnd.randrange(2), "n": rnd.choice([0, 2, 4, 6, 9, 12]),
            "own": rnd.randint(1, 4), "salt": rnd.choice([0, 0, 0, 1]),
            "seed": rnd.choice([5, 6, rnd.randrange(1000)]),
        }  # fmt: skip

    def draw_grow(self, rnd: random.Random) -> Given:
        return {
            **self.draw_which(rnd), "n": rnd.choice([1, 1, 2, 5]),
            "seed": rnd.choice([7, rnd.randrange(1000)]),
        }  # fmt: skip

    def draw_commit(self, rnd: random.Random) -> Given:
        return {**self.draw_which(rnd), "back": rnd.randint(0, 3)}

    def draw_retract(self, rnd: random.Random) -> Given:
        return {**self.draw_which(rnd), "back": rnd.choice([0, 1, 2, 5, 20])}

    def draw_go(self, rnd: random.Random) -> Given:
        return self.draw_which(rnd)

    draw_preempt = draw_next = draw_close = draw_go

    def draw_clear(self, rnd: random.Random) -> Given:
        return {"seed": rnd.randrange(2)}

    def draw_serve(self, rnd: random.Random) -> Given:
        return {**self.draw_come(rnd), "new": rnd.randint(1, 5), "stop": rnd.randint(0, 8)}

    def draw_stream(self, rnd: random.Random) -> Given:
        return {**self.draw_come(rnd), "new": rnd.randint(1, 5)}


def outcome(stream: Iterator[int]) -> Any:
    """The next token, or how the stream ends."""
    try:
        return next(stream)
    except (StopIteration, OutOfBlocksError) as error:
        return type(error)
