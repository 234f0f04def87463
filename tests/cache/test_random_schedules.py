"""Random schedules from chosen states: every kind of cache goes on rightly from every state.

Schedules drawn blindly seldom reach the states in which a stale slot is read. So each schedule
here first takes a way to one state, then fills whatever must not matter, then takes a step of one
shape and a few random ones. Each step is compared with ``ListCache``, and before each step the
states that it starts from are counted: a state that no step started from is a failure.
"""

import random
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
from oracles.cache_kinds import PLACEMENTS, STORES, fits, list_cache, model_of
from oracles.toys import batch
from oracles.twins import Twins

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, CAPACITY, LONGEST = 3, 44, 36
HEADS_HERE = "two query heads share one"
Visits = Counter[tuple[str, str]]  # (state, shape of the step that follows)


class Schedule:
    """One pair of twins, one stream of random numbers, and the states that were seen."""

    def __init__(self, twins: Twins, rnd: random.Random, visits: Visits) -> None:
        self.twins, self.rnd, self.visits = twins, rnd, visits

    def step(self, counts: list[int]) -> None:
        T = max(1, *counts)
        shape = shape_of(counts, T)
        self.visits.update((state, shape) for state in states_of(self.twins))
        self.twins.step(batch(len(counts), T, self.rnd.randrange(1000)), counts)

    def each(self, low: int, high: int) -> list[int]:
        return [self.rnd.randint(low, high) for _ in self.twins.texts]

    def all(self, n: int) -> list[int]:
        return [n] * len(self.twins.texts)


def shape_of(counts: list[int], T: int) -> str:
    if any(count != T for count in counts):
        return "ragged"
    return "decode" if T == 1 else "short chunk" if T < 4 else "long chunk"


def states_of(twins: Twins) -> set[str]:
    """What a row or the whole cache looks like just before a step."""
    lists, lengths = twins.lists, twins.lengths
    waiting = [n - s - lists.tail for n, s in zip(lengths, lists.settled, strict=False)]
    alive = lists.alive
    lost = [n - len(one) for row, n in enumerate(lengths) for one in alive[row]]
    rings = [w - 1 + lists.rollback for w in lists.windows if w and lists.rollback]
    found = {
        "empty row": 0 in lengths and max(lengths) > 0,
        "ragged": len(set(lengths)) > 1,
        "wrapped": max(lost) > 0,
        "wrapped and ragged": max(lost) > 0 and len(set(lengths)) > 1,
        "mid-tile": max(waiting) > 0,
        "at a tile's edge": lists.tile > 1 and max(lengths) > lists.tail and max(waiting) == 0,
        "at a ring's edge": any(
            n > lists.sinks and (n - lists.sinks) % ring == 0 for n in lengths for ring in rings
        ),
        "fewer rows": len(lengths) < ROWS,
    }
    return {state for state, here in found.items() if here} | {"after " + twins.last}


# ---- Ways to a state


def to_an_empty_row(s: Schedule) -> None:
    counts = [0, *s.each(1, 9)[1:]]
    s.rnd.shuffle(counts)
    s.step(counts)


def to_ragged(s: Schedule) -> None:
    s.step(s.all(2))
    s.step(s.rnd.sample([1, 3, 6], 3))


def to_wrapped(s: Schedule) -> None:
    s.step(s.all(s.rnd.randint(5, 9)))
    s.step(s.all(s.rnd.randint(5, 9)))


def to_wrapped_and_ragged(s: Schedule) -> None:
    to_wrapped(s)
    s.step(s.rnd.sample([0, 1, 3], 3))


def to_one_row_wrapped(s: Schedule) -> None:
    s.step(s.rnd.sample([1, 13, 4], 3))
    s.step(s.all(1))


def to_an_edge(s: Schedule) -> None:
    """Tiles that are full in every row, or a ring that is."""
    lists = s.twins.lists
    rings = [w - 1 + lists.rollback for w in lists.windows if w and lists.rollback]
    every, first = (rings[0], lists.sinks) if rings else (lists.tile, lists.tail)
    s.step(s.each(1, 3))
    goal = first + every * 2
    s.step([max(0, goal - n) for n in s.twins.lengths])


def to_mid_tile(s: Schedule) -> None:
    to_an_edge(s)
    s.step(s.all(1))


def to_truncated(s: Schedule) -> None:
    to_wrapped(s)
    s.step(s.all(1))
    s.twins.truncate([n - 1 for n in s.twins.lengths])


def to_truncated_far(s: Schedule) -> None:
    """Each row as far back as it can go, or not at all."""
    to_ragged(s)
    s.step(s.all(1))
    for row in s.rnd.sample(range(ROWS), 2):
        new = s.twins.lengths
        for n in range(new[row] + 1):
            if s.twins.lists.can_truncate([*new[:row], n, *new[row + 1 :]]):
                new[row] = n
                break
        s.twins.truncate(new)


def to_truncated_to_nothing(s: Schedule) -> None:
    to_wrapped(s)
    s.twins.truncate([0, *s.twins.lengths[1:]])


def to_selected(s: Schedule) -> None:
    to_wrapped_and_ragged(s)
    s.twins.select(s.rnd.choice([[2, 0, 0], [1, 1, 0], [2, 1, 0], [0, 2, 0]]))


def to_fewer_rows(s: Schedule) -> None:
    to_wrapped_and_ragged(s)
    s.twins.select([2, 0])


def to_regrown(s: Schedule) -> None:
    """Rows were dropped, and others took their places."""
    to_one_row_wrapped(s)
    s.twins.select([s.rnd.randrange(ROWS)])
    s.step([1])
    s.twins.select([0, 0, 0])


def to_reset(s: Schedule) -> None:
    to_wrapped_and_ragged(s)
    s.twins.reset()


def to_failed_midway(s: Schedule) -> None:
    """From even lengths: a tile of two cannot be half undone."""
    s.step([2 * n for n in s.each(1, 3)])
    counts = [1, *s.each(0, 1)[1:]]
    s.twins.fail(batch(ROWS, 1, 7), counts, s.rnd.choice([0, -1]))


def to_spoiled(s: Schedule) -> None:
    s.step([2 * n for n in s.each(1, 3)])
    s.twins.spoil(s.rnd.sample([1, 0, 1], 3), 1)


WAYS: list[Callable[[Schedule], None]] = [
    to_an_empty_row, to_ragged, to_wrapped, to_wrapped_and_ragged, to_one_row_wrapped, to_an_edge,
    to_mid_tile, to_truncated, to_truncated_far, to_truncated_to_nothing, to_selected,
    to_fewer_rows, to_regrown, to_reset, to_failed_midway, to_spoiled,
]  # fmt: skip
SHAPES: dict[str, Callable[[Schedule], list[int]]] = {
    "decode": lambda s: s.all(1),
    "short chunk": lambda s: s.all(2),
    "long chunk": lambda s: s.all(7),
    "ragged": lambda s: [s.rnd.randint(0, 3), *s.each(0, 3)[2:], 4][: len(s.twins.texts)],
}


def go_on(s: Schedule) -> None:
    """One random operation, and a step after it."""
    lengths = s.twins.lengths
    operation = s.rnd.randrange(5)
    if operation == 0:
        s.twins.truncate([max(0, n - s.rnd.randint(0, 2)) for n in lengths])
    elif operation == 1:
        s.twins.select([s.rnd.randrange(len(lengths)) for _ in range(ROWS)])
    elif operation == 2:
        s.twins.cache.fill_unused(s.rnd.choice([float("nan"), 1e10]))
    if max(s.twins.lengths) + 6 <= LONGEST:
        s.step(s.rnd.choice([s.all(1), s.all(6), s.each(0, 4)]))


# ---- Every placement and shape of a step. Stores and windows rotate underneath; the windows are
# small, so that rings soon are full.

SOME_STORES = [
    "dense", "int4", "dense, tail of 3", "int4, tail of 2", "int8 keys per channel, tail of 3",
    "int4 per channel, no tail",
]  # fmt: skip
SMALL_WINDOWS = [
    "3", "3 and 2 sinks", "1 global : 2 local, sinks", "alternating, local first", "1",
    "2 and 2 sinks", "2 local : 1 global",
]  # fmt: skip
ANY_STATE = {
    "empty row", "ragged", "fewer rows", "after step", "after truncate", "after select",
    "after reset", "after spoil", "after fail",
}  # fmt: skip
TILE_STATES = {"mid-tile", "at a tile's edge"}
RING_STATES = {"wrapped", "wrapped and ragged", "at a ring's edge"}


def kinds(placed: str) -> list[tuple[str, str]]:
    """Stores and windows that go together: each store comes up once in every six."""
    rounds = product(range(len(SMALL_WINDOWS)), enumerate(SOME_STORES))
    turns = len(SMALL_WINDOWS)
    pairs = [(stored, SMALL_WINDOWS[(turn + i) % turns]) for turn, (i, stored) in rounds]
    return [
        (stored, windows)
        for stored, windows in pairs
        if fits(PLACEMENTS[placed], STORES[stored], model_of(HEADS_HERE, windows))
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("placed", PLACEMENTS)
def test_from_every_state_each_step_is_that_of_the_lists(placed: str, shape: str) -> None:
    visits: Visits = Counter()
    place, every = PLACEMENTS[placed], kinds(placed)
    for i, way in enumerate(WAYS * 2):
        stored, windows = every[(i + 3 * len(shape)) % len(every)]
        model, store = model_of(HEADS_HERE, windows), STORES[stored]
        twins = Twins(
            model, place.new(model, ROWS, CAPACITY, store), list_cache(place, store, model, ROWS)
        )
        schedule = Schedule(twins, random.Random(i), visits)
        way(schedule)
        if i % 3:
            twins.cache.fill_unused((1e10, float("nan"))[i % 3 - 1])
        schedule.step(SHAPES[shape](schedule))
        twins.check()
        for _ in range(2):
            go_on(schedule)
        twins.check()
    needed = ANY_STATE | (RING_STATES if place.rollback else set())
    needed |= TILE_STATES if place.largest_tile > 1 else set()
    assert {state for state in needed if not visits[state, shape]} == set()
