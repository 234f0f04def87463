"""Caches whose rows have slots or tables of their own, through any order of operations.

After each one the lengths, every stored vector and the pools are those of the plain models; each
forward pass gives their logits. Whether a call must be refused is theirs to say, too: then it is
refused by name, and nothing has changed.
"""

import copy
import random
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fuzz import refusals
from fuzz.case import Case, Op
from fuzz.kinds import PLACED
from fuzz.machine import COPIES, UNFINISHED, VALUES, Given, Machine, fitted
from fuzz.shelves import Tables, in_use
from fuzz.tally import Tally
from fuzz.watch import (
    close,
    expect,
    identical,
    must_raise,
    refused,
    same,
    state_of,
    unchanged,
    untouched_slots_are_zero,
)
from kvbook.cache import KVView
from kvbook.errors import CacheFullError
from kvbook.generate import Sampler, generate_cached, stream_cached
from kvbook.generate.sampling import seeded

# What is more likely than elsewhere: ways to states that are seldom reached otherwise.
NEXT = {
    "spoil": {"select": 2, "ragged": 1},
    "select": {"ragged": 2, "truncate": 1},
    "truncate": {"ragged": 2, "select": 1, "chunk": 1},
}
USES = ["a step", "select()", "entries()", "truncate() to what was not finished"]


class Rows(Machine):
    """``texts`` is what the active rows hold."""

    WEIGHTS: ClassVar[dict[str, int]] = {
        "one": 18, "chunk": 8, "ragged": 16, "select": 8, "truncate": 7, "truncate_all": 3,
        "reset": 1, "fail": 6, "spoil": 4, "copy": 4, "poison": 9, "generate": 5, "stream": 4,
        "refuse": 14,
    }  # fmt: skip

    def __init__(self, case: Case, tally: Tally) -> None:
        super().__init__(case, tally)
        sizes, placed = case.sizes, PLACED[case.placed]
        self.rows = sizes["rows"]
        self.last = ""  # the operation that was drawn last
        self.texts = [self.new_text() for _ in range(self.rows)]
        self.tables = None
        self.capacity: int | None = None
        if "blocks" in sizes:
            self.tables = Tables(self.rows, sizes["blocks"], sizes["block"])
        elif placed.rollback is None or None in self.model.config.windows:
            self.capacity = sizes["capacity"]
        self.allocated = self.cache.allocated_bytes

    # ---- What the plain models say

    @property
    def lengths(self) -> list[int]:
        return [len(text.tokens) for text in self.texts]

    @property
    def settled(self) -> list[int]:
        return [text.settled for text in self.texts]

    def cache_has_room(self, counts: Sequence[int]) -> bool:
        ends = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        if self.capacity is not None and max(ends) > self.capacity:
            return False
        return self.tables is None or self.tables.has_room(self.settled, ends)

    def has_room(self, counts: Sequence[int]) -> bool:
        ends = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        return self.cache_has_room(counts) and max(ends) <= self.model.config.max_positions

    def note_tables(self, before: Sequence[int]) -> None:
        """The texts have grown from ``before`` settled tokens."""
        if self.tables is not None:
            self.tables.step(before, self.settled)

    def check(self) -> None:
        same("lengths", self.cache.lengths, tuple(self.lengths))
        same("capacity", self.cache.capacity, self.capacity)
        same("allocated bytes", self.cache.allocated_bytes, self.allocated)
        for row, text in enumerate(self.texts):
            for layer in range(self.layers):
                found = self.cache.entries(layer, row)
                for name, a, b in zip(("keys", "values"), found, text.entries(layer), strict=True):
                    close(f"{name} of layer {layer}, row {row}", a, b)
        untouched_slots_are_zero(self.cache)
        if self.tables is not None:
            for pool in (pool for group in self.cache.groups for pool in group.placement.pools):
                same("blocks in use", pool.in_use, in_use(self.tables.tables))

    # ---- Forward passes

    def do_one(self, seed: int, last: bool) -> None:
        self.step([1] * len(self.texts), 1, seed, last)

    def do_chunk(self, n: int, seed: int, last: bool) -> None:
        self.step([n] * len(self.texts), n, seed, last)

    def do_ragged(self, counts: list[int], more: int, seed: int, last: bool) -> None:
        """``more`` is padding beyond what the longest row needs."""
        counts = fitted(counts, len(self.texts))
        self.step(counts, max(1, *counts) + more, seed, last)

    def step(self, counts: list[int], T: int, seed: int, last: bool) -> None:
        tokens = self.random_tokens(seed, len(counts), T)

        def forward() -> Tensor:
            return self.forward(tokens, counts, last)

        if self.is_refused(counts, forward):
            return
        self.judge_all(tokens, counts, forward(), seed)

    def judge_all(self, tokens: list[list[int]], counts: list[int], logits: Tensor, turn: int
                  ) -> None:
        settled, columns = self.settled, logits.shape[1]
        for row, count in enumerate(counts):
            found = logits[row, columns - min(count, columns) :]
            new = tokens[row][len(tokens[row]) - count :]
            self.judge(f"logits of row {row}", self.texts[row], new, found, turn + row)
        self.note_tables(settled)

    def is_refused(self, counts: list[int], forward: Callable[[], object]) -> bool:
        """Whether there is no room; then the call must say so."""
        if self.cache_has_room(counts):
            self.cache.check_room(counts)
        else:
            refused("check_room()", lambda: self.cache.check_room(counts), self.cache,
                    CacheFullError)
        if self.has_room(counts):
            return False
        self.tally.refused["no room"] += 1
        refused("tokens without room", forward, self.cache, CacheFullError)
        return True

    def do_fail(self, counts: list[int], layer: int, late: bool, way: str, use: str, seed: int
                ) -> None:
        """A forward pass that fails, what people do next, and the way back."""
        counts, layer = fitted(counts, len(self.texts)), layer % self.layers
        T = max(1, *counts)
        tokens = self.random_tokens(seed, len(counts), T)
        if not self.has_room(counts):
            return
        lengths, settled = self.lengths, self.settled
        self.crash(tokens, counts, layer, late)
        if layer < self.layers - 1 or not late:
            error = ValueError if use.startswith("truncate") else UNFINISHED
            refused(f"{use} in an unfinished step", self.uses(use, counts), self.cache, error)
        if way == "copy":
            self.cache = copy.deepcopy(self.cache)
        for text, row, count in zip(self.texts, tokens, counts, strict=True):
            text.step(self.built.weights, row[T - count :])
        self.note_tables(settled)
        self.go_back(lengths, reset=way == "reset")

    def uses(self, use: str, counts: list[int]) -> Callable[[], object]:
        """What must not work before the way back."""
        rows, last = len(self.texts), self.layers - 1
        grown = counts if any(counts) else [1] * rows
        beyond = [n + count for n, count in zip(self.lengths, grown, strict=True)]
        return {
            "a step": lambda: self.model(torch.zeros(rows, 1, dtype=torch.long), self.cache),
            "select()": lambda: self.cache.select([0]),
            "entries()": lambda: self.cache.entries(last, 0),
            "truncate() to what was not finished": lambda: self.cache.truncate(beyond),
        }[use]

    def go_back(self, lengths: list[int], reset: bool) -> None:
        """To the lengths before a step, if what they need is still there; else to nothing."""
        possible = all(
            text.can_go_back_to(n) for text, n in zip(self.texts, lengths, strict=True)
        )
        if possible and not reset:
            self.cache.truncate(lengths)
            self.truncated(lengths)
            return
        if not possible:
            must_raise("truncate() to what is lost", lambda: self.cache.truncate(lengths),
                       ValueError)
        self.do_reset()

    def truncated(self, lengths: list[int]) -> None:
        for text, n in zip(self.texts, lengths, strict=True):
            text.go_back_to(n)
        if self.tables is not None:
            self.tables.truncate(self.settled)

    def do_spoil(self, counts: list[int], more: int) -> None:
        """Keys and values that are not numbers, taken back: nothing of them may be left."""
        counts = fitted(counts, len(self.texts))
        T = max(1, *counts) + more
        if not self.has_room(counts):
            return
        lengths, settled = self.lengths, self.settled
        self.cache.reserve(counts, T)
        for layer, kind in enumerate(self.cache.layer_kinds):
            new = torch.full((len(counts), kind.kv_heads, T, kind.key_dim + kind.value_dim),
                             float("nan"), dtype=kind.dtype)
            view = self.cache.update(layer, *new.split([kind.key_dim, kind.value_dim], -1))
            expect(isinstance(view, KVView) or hasattr(view, "tiles"), "update() gives a view")
        for text, count in zip(self.texts, counts, strict=True):
            text.step(self.built.weights, [0] * count)
        self.note_tables(settled)
        self.go_back(lengths, reset=False)

    # ---- Rows and lengths

    def do_select(self, rows: list[int]) -> None:
        chosen = [row % len(self.texts) for row in rows][: self.rows]
        self.cache.select(chosen)
        self.tally.sequences += len(chosen)
        self.texts = [self.texts[row].fork() for row in chosen]
        if self.tables is not None:
            self.tables.select(chosen)

    def do_truncate(self, back: list[int]) -> None:
        gone = fitted(back, len(self.texts))
        self.truncate([max(0, n - g) for n, g in zip(self.lengths, gone, strict=True)])

    def do_truncate_all(self, back: int) -> None:
        """One integer for all rows."""
        n = max(0, min(self.lengths) - back)
        if all(text.can_go_back_to(n) for text in self.texts):
            self.cache.truncate(n)
            self.truncated([n] * len(self.texts))
        else:
            self.truncate([n] * len(self.texts))

    def truncate(self, lengths: list[int]) -> None:
        if all(text.can_go_back_to(n) for text, n in zip(self.texts, lengths, strict=True)):
            self.cache.truncate(lengths)
            self.truncated(lengths)
            return
        self.tally.refused["truncate to what is lost"] += 1
        refused("truncate() to what is lost", lambda: self.cache.truncate(lengths), self.cache)

    def do_reset(self) -> None:
        self.cache.reset()
        self.texts = [self.new_text() for _ in range(self.rows)]
        if self.tables is not None:
            self.tables.tables = [[] for _ in range(self.rows)]

    def do_poison(self, value: str) -> None:
        """What holds no token must not matter."""
        self.cache.fill_unused(VALUES[value])

    def do_copy(self, how: str, keep: bool, seed: int) -> None:
        """The copy and the original go on alike, to the bit, and then apart."""
        original, other = self.cache, COPIES[how](self.cache)
        same("state of a copy", state_of(other)[0], state_of(original)[0])
        counts = [1 + (seed + row) % 2 for row in range(len(self.texts))]
        if self.has_room(counts):
            tokens = self.random_tokens(seed, len(counts), 2)
            logits = self.forward(tokens, counts)
            self.cache = other
            identical("logits of a copy", self.forward(tokens, counts), logits)
            self.judge_all(tokens, counts, logits, seed)
            for found, expected in zip(other.tensors, original.tensors, strict=True):
                identical("what a copy holds after a step", found, expected)
        dropped, self.cache = (original, other) if keep else (other, original)
        before = state_of(self.cache)
        dropped.fill_unused(float("nan"))
        dropped.reset()
        dropped.fill_unused(float("nan"))
        self.model(torch.zeros(dropped.rows, 1, dtype=torch.long), dropped)
        unchanged(self.cache, before, "what was done to a copy")

    # ---- Generation

    def do_generate(self, prompts: list[int], new: int, stop: list[int], temperature: float,
                    seed: int) -> None:
        """``stop``: the row and the step of a token that ends texts, or nothing."""
        counts = [max(1, n) for n in fitted(prompts, len(self.texts))]
        tokens = self.random_tokens(seed, len(counts), max(counts))
        given = [row[-count:] for row, count in zip(tokens, counts, strict=True)]
        wanted = [count + new for count in counts]
        sampler = Sampler(temperature, generator=seeded([seed + row for row in range(len(counts))]))
        fits = self.has_room(wanted)
        drafts = self.drawn(given, new, temperature, seed, ()) if fits and stop else [[]]
        row = drafts[stop[0] % len(drafts)] if stop else []
        ends = {row[stop[1] % len(row)]} if row else set()

        def generate() -> list[list[int]]:
            return generate_cached(self.model, given, new, sampler, ends, self.cache)

        if not fits:
            self.tally.refused["no room to generate"] += 1
            refused("generation without room", generate, self.cache, CacheFullError)
            return
        settled = self.settled
        expected = self.drawn(given, new, temperature, seed, ends, keep=True)
        same("generated tokens", generate(), expected)
        self.note_tables(settled)

    def drawn(self, prompts: list[list[int]], new: int, temperature: float, seed: int,
              ends: set[int] | tuple[()], keep: bool = False) -> list[list[int]]:
        """What the plain models draw after these prompts; with ``keep`` they hold it, too."""
        answers = []
        for row, prompt in enumerate(prompts):
            text = self.texts[row] if keep else self.texts[row].fork()
            sampler = Sampler(temperature, generator=seeded([seed + row]))
            answer, fed = [], prompt
            for _ in range(new):
                token = int(sampler(text.step(self.built.weights, fed)[-1:]))
                if token in ends:
                    break
                answer.append(token)
                fed = [token]
            else:
                text.step(self.built.weights, fed)
            answers.append(answer)
        return answers

    def do_stream(self, prompts: list[int], new: int, take: int, seed: int) -> None:
        """A stream that is left after ``take`` tokens: the last one has not been read."""
        counts = [max(1, n) for n in fitted(prompts, len(self.texts))]
        take = min(take, new)
        tokens = self.random_tokens(seed, len(counts), max(counts))
        given = [row[-count:] for row, count in zip(tokens, counts, strict=True)]
        if not self.has_room([count + new - 1 for count in counts]):
            self.tally.refused["no room to stream"] += 1
            refused("a stream without room",
                    lambda: stream_cached(self.model, given, new, cache=self.cache),
                    self.cache, CacheFullError)
            return
        settled = self.settled
        stream = stream_cached(self.model, given, new, cache=self.cache)
        found = [next(stream).tolist() for _ in range(take)]
        if not take:
            return
        expected = self.drawn(given, take, 0.0, seed, ())
        same("streamed tokens", [list(row) for row in zip(*found, strict=True)], expected)
        for text, prompt, answer in zip(self.texts, given, expected, strict=True):
            for fed in [prompt, *([token] for token in answer[:-1])]:
                text.step(self.built.weights, fed)
        self.note_tables(settled)

    # ---- What must be refused

    def do_refuse(self, what: str, seed: int) -> None:
        self.tally.refused[what] += 1
        refused(what, refusals.of_rows(self, what, seed), self.cache)

    # ---- What is drawn

    def draw(self, rnd: random.Random) -> Op:
        full = not self.has_room([2] * len(self.texts))
        weights = dict(self.WEIGHTS)
        if full and rnd.random() < 0.7:
            weights = {"truncate": 4, "truncate_all": 2, "reset": 1, "select": 2}
        if self.last in NEXT and rnd.random() < 0.4:
            weights = NEXT[self.last]
        name = self.last = rnd.choices(list(weights), list(weights.values()))[0]
        return Op(name, getattr(self, "draw_" + name)(rnd))

    def counts(self, rnd: random.Random, most: int) -> list[int]:
        return [rnd.randint(0, most) for _ in self.texts]

    def draw_one(self, rnd: random.Random) -> Given:
        return {"seed": rnd.randrange(1000), "last": rnd.random() < 0.2}

    def draw_chunk(self, rnd: random.Random) -> Given:
        n = rnd.choice([2, 2, 3, 4, 6, 9, 13, self.edge(rnd)])
        return {"n": n, **self.draw_one(rnd)}

    def edge(self, rnd: random.Random) -> int:
        """As many tokens as every row can just take, or one more."""
        n = 1
        while self.has_room([n + 1] * len(self.texts)):
            n += 1
        return n + rnd.randint(0, 1)

    def draw_ragged(self, rnd: random.Random) -> Given:
        counts = self.counts(rnd, rnd.choice([1, 2, 3, 5, 8]))
        return {"counts": counts, "more": rnd.choice([0, 0, 0, 1, 2]), **self.draw_one(rnd)}

    def draw_select(self, rnd: random.Random) -> Given:
        n = rnd.randint(1, self.rows)
        return {"rows": [rnd.randrange(len(self.texts)) for _ in range(n)]}

    def draw_truncate(self, rnd: random.Random) -> Given:
        most = rnd.choice([1, 2, 3, 6, 20])
        return {"back": self.counts(rnd, most)}

    def draw_truncate_all(self, rnd: random.Random) -> Given:
        return {"back": rnd.choice([0, 1, 2, 3, 30])}

    def draw_reset(self, rnd: random.Random) -> Given:
        return {}

    def draw_poison(self, rnd: random.Random) -> Given:
        return {"value": rnd.choice(["not a number", "not a number", "large", "infinity"])}

    def draw_fail(self, rnd: random.Random) -> Given:
        return {
            "counts": self.counts(rnd, rnd.choice([1, 2, 5])),
            "layer": rnd.randrange(self.layers),
            "late": rnd.random() < 0.5,
            "way": rnd.choice(["truncate", "truncate", "copy", "reset"]),
            "use": rnd.choice(USES),
            "seed": rnd.randrange(1000),
        }

    def draw_spoil(self, rnd: random.Random) -> Given:
        return {"counts": self.counts(rnd, rnd.choice([1, 2, 5, 8])), "more": rnd.choice([0, 0, 1])}

    def draw_copy(self, rnd: random.Random) -> Given:
        return {
            "how": rnd.choice(list(COPIES)), "keep": rnd.random() < 0.5,
            "seed": rnd.randrange(1000),
        }  # fmt: skip

    def draw_generate(self, rnd: random.Random) -> Given:
        return {
            "prompts": [rnd.randint(1, 4) for _ in self.texts],
            "new": rnd.choice([1, 2, 3, 4, min(9, self.edge(rnd))]),
            "stop": rnd.choice([[], [rnd.randrange(3), rnd.randrange(4)]]),
            "temperature": rnd.choice([0.0, 0.0, 1.0]),
            "seed": rnd.randrange(1000),
        }

    def draw_stream(self, rnd: random.Random) -> Given:
        return {
            "prompts": [rnd.randint(1, 4) for _ in self.texts], "new": rnd.randint(1, 4),
            "take": rnd.randint(0, 3), "seed": rnd.randrange(1000),
        }  # fmt: skip

    def draw_refuse(self, rnd: random.Random) -> Given:
        return {"what": rnd.choice(list(refusals.OF_ROWS)), "seed": rnd.randrange(1000)}
