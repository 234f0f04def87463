"""Requests for tests, what each would get alone, and the blocks as they must be owned."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

from kvbook.cache import BlockPool, PrefixCache
from kvbook.generate import Sampler, generate_cached
from kvbook.generate.sampling import seeded
from kvbook.serve import Engine, LogicalClock, Output, Request, Scheduler
from kvbook.serve.scheduler import Job
from oracles.toys import text, toy

WARM = Sampler(temperature=1.0, top_k=8)


def scheduler(blocks: int = 12, block_size: int = 4, **limits: Any) -> Scheduler:
    limits = {"token_budget": 16, "max_rows": 4, "clock": LogicalClock(), **limits}
    return Scheduler(PrefixCache(BlockPool(blocks, block_size), "toy"), **limits)


def engine(blocks: int = 16, block_size: int = 4, **limits: Any) -> Engine:
    limits = {"token_budget": 16, "max_rows": 4, "clock": LogicalClock(), **limits}
    return Engine(toy(), blocks, block_size, **limits)


def requests(n: int, seed: int = 0, **fields: Any) -> list[Request]:
    """Random ones; many begin alike, some draw, all fit into 10 blocks of 4."""
    chance = Random(seed)
    beginnings = [text(size, seed=size) for size in (4, 9, 13)]
    made = []
    for number in range(n):
        begin = chance.choice(beginnings)
        prompt = begin[: chance.randint(0, len(begin))] + text(chance.randint(1, 8), seed=number)
        sampler = chance.choice([Sampler(), WARM])
        made.append(Request(prompt, chance.randint(1, 16), sampler, seed=number, **fields))
    return made


def alone(request: Request) -> list[int]:
    """What the request draws with a cache of its own."""
    return list(_alone(request.prompt, request.max_new_tokens, request.sampler, request.seed,
                       request.stop_tokens))  # fmt: skip


@lru_cache(maxsize=4096)
def _alone(prompt: Any, new: int, sampler: Sampler, seed: int, stops: Any) -> tuple[int, ...]:
    own = replace(sampler, generator=seeded([seed])[0])
    [drawn] = generate_cached(toy(), [list(prompt)], new, own, stops)
    return tuple(drawn)


def texts(outputs: Iterable[Output]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for output in outputs:
        found.setdefault(output.id, []).extend(output.tokens)
    return found


def check_blocks(prefix: PrefixCache, running: list[Job]) -> None:
    """Every block is owned by the running sequences that name it, and by nobody else."""
    pool = prefix.pool
    named = Counter(block for job in running for block in job.running.blocks)
    assert [pool.owners(block) for block in range(pool.blocks)] == [
        named[block] for block in range(pool.blocks)
    ]
    assert pool.free + pool.evictable + pool.in_use == pool.blocks
    for job in running:
        assert len(job.running.blocks) == -(-len(job.running.tokens) // pool.block_size)
