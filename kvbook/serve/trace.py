"""Requests that come over time: made from a seed, and replayed to an engine.

Knows: arrival times, lengths, shared beginnings. Does not know: how requests are served.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from kvbook.cache.sizes import check_class, check_list, check_sizes
from kvbook.generate.sampling import Sampler, greedy
from kvbook.serve.engine import Engine
from kvbook.serve.request import Request


@dataclass(frozen=True)
class Arrival:
    """A request, and when it comes: in units of the clock, from the start of the trace."""

    time: float
    request: Request


@dataclass(frozen=True)
class Mix:
    """What the requests of a trace are like. Lengths are drawn between two limits, both included.

    ``shared`` of the requests begin with one of ``beginnings`` texts of ``beginning`` tokens, as
    a system prompt would; the rest of each prompt is its own. Tokens are drawn below
    ``vocab_size``.
    """

    prompt: tuple[int, int] = (16, 96)  # tokens behind the shared beginning
    new: tuple[int, int] = (8, 64)
    shared: float = 0.5
    beginnings: int = 2
    beginning: int = 64
    vocab_size: int = 256
    sampler: Sampler = field(default=greedy)

    def __post_init__(self) -> None:
        for name, limits in (("prompt", self.prompt), ("new", self.new)):
            pair = isinstance(limits, list | tuple) and len(limits) == 2
            whole = pair and all(type(n) is int for n in limits)
            if not whole or not 1 <= limits[0] <= limits[1]:
                raise ValueError(
                    f"{name} must be two lengths from 1 on, the smaller one first, got "
                    f"{limits!r:.60}"
                )
        check_sizes(beginnings=self.beginnings, beginning=self.beginning,
                    vocab_size=self.vocab_size)
        if type(self.shared) not in (int, float) or not 0 <= self.shared <= 1:
            raise ValueError(f"shared must be a share from 0 to 1, got {self.shared!r:.60}")
        check_class("sampler", self.sampler, Sampler, "greedy, or Sampler(temperature=1.0)")


PLAIN_MIX = Mix()


def make_trace(requests: int, rate: float, mix: Mix = PLAIN_MIX, seed: int = 0) -> list[Arrival]:
    """So many requests, ``rate`` of them per unit of time on average, as a Poisson process.

    The gaps between arrivals are independent and exponential, so requests come in bunches. The
    same seed gives the same trace on every machine.

    >>> [round(arrival.time, 2) for arrival in make_trace(3, rate=2.0)]
    [0.29, 1.2, 2.15]
    """
    check_sizes(requests=requests)
    check_class("mix", mix, Mix, "Mix(prompt=(16, 96), new=(8, 64))")
    if type(rate) not in (int, float) or not 0 < rate < float("inf"):
        raise ValueError(f"rate must be a number of requests above 0, got {rate!r:.60}")
    if type(seed) is not int:
        raise ValueError(f"seed must be an integer, got {seed!r:.60}")
    chance = Random(seed)

    def text(length: int) -> list[int]:
        return [chance.randrange(mix.vocab_size) for _ in range(length)]

    beginnings = [text(mix.beginning) for _ in range(mix.beginnings)]
    trace, time = [], 0.0
    for number in range(requests):
        time += chance.expovariate(rate)
        begin = chance.choice(beginnings) if chance.random() < mix.shared else []
        prompt = begin + text(chance.randint(*mix.prompt))
        new = chance.randint(*mix.new)
        trace.append(Arrival(time, Request(prompt, new, mix.sampler, seed=number)))
    return trace


def replay(engine: Engine, trace: Sequence[Arrival]) -> list[list[int]]:
    """Add each request when it is due, and step until all have ended: their new tokens, in order.

    The trace begins now, by the engine's clock. An engine that has nothing to do waits for the
    next arrival. What was measured stands in ``engine.requests`` and ``engine.steps``.
    """
    check_class("engine", engine, Engine, "Engine(model, blocks)")
    due = arrivals(trace)
    start, clock = engine.clock.now(), engine.clock
    texts: dict[int, list[int]] = {}
    next_one = next(due, None)
    while next_one is not None or engine.busy:
        if not engine.busy and next_one is not None:
            clock.wait_until(start + next_one.time)
        while next_one is not None and start + next_one.time <= clock.now():
            texts[engine.add(next_one.request)] = []
            next_one = next(due, None)
        for output in engine.step():
            texts[output.id] += output.tokens
    return list(texts.values())


def arrivals(trace: Sequence[Arrival]) -> Iterator[Arrival]:
    """The trace one by one. Raises ``ValueError`` unless it is in the order of time."""
    check_list("trace", trace)
    for one in trace:
        check_class("an arrival", one, Arrival, "make_trace() makes them")
    for before, after in pairwise(trace):
        if after.time < before.time:
            raise ValueError(f"arrivals must be in order, got {before.time} before {after.time}")
    return iter(trace)
