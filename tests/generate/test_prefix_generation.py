"""Generation over a prefix cache gives what a cold run gives, whatever was found and evicted."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from oracles.prefixes import running
from oracles.toys import text, toy

from kvbook.cache import BlockPool, KVCache, PrefixCache
from kvbook.cache.block_key import Digest, Identity
from kvbook.cache.prefix import CachedSequence
from kvbook.errors import CacheFullError, OutOfBlocksError
from kvbook.generate import generate_cached, generate_with_prefix, stream_with_prefix

pytestmark = pytest.mark.usefixtures("one_thread")


def made(blocks: int = 16, block_size: int = 4) -> tuple[KVCache, PrefixCache]:
    pool = BlockPool(blocks, block_size)
    return toy().new_bound_cache(pool), PrefixCache(pool, "toy")


def cold(prompt: list[int], new: int) -> list[int]:
    return generate_cached(toy(), [prompt], new)[0]


def test_the_second_prompt_starts_where_the_first_is_equal_to_it() -> None:
    cache, prefix = made()
    system = text(9, seed=1)
    for question in (text(3, seed=2), text(5, seed=3)):
        prompt = system + question
        assert generate_with_prefix(toy(), prompt, 4, cache, prefix) == cold(prompt, 4)
    # 12 and 14 tokens; two full blocks of 4 are common to both.
    assert (prefix.stats.prompt_tokens, prefix.stats.cached_tokens) == (26, 8)


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_whole_prompt_that_is_cached_still_computes_its_last_token(
    length: int, found: int
) -> None:
    """vllm-project/vllm#11186: block 4, a prompt of 8 reuses 4, one of 9 reuses 8."""
    cache, prefix = made()
    prompt = text(length, seed=4)
    for _ in range(2):
        assert generate_with_prefix(toy(), prompt, 1, cache, prefix) == cold(prompt, 1)
    assert prefix.stats.cached_tokens == found


def test_what_was_generated_is_found_as_well() -> None:
    cache, prefix = made()
    prompt = text(6, seed=5)
    answer = generate_with_prefix(toy(), prompt, 7, cache, prefix)
    # 6 + 7 tokens, of which the last was never fed: 12 are written, three blocks of 4.
    follow_up = [*prompt, *answer, 3]
    assert generate_with_prefix(toy(), follow_up, 2, cache, prefix) == cold(follow_up, 2)
    assert prefix.stats.cached_tokens == 12


def test_random_prompts_with_common_beginnings_and_a_small_pool() -> None:
    """Hits of no block, some and all; evictions between; the pool is never lost."""
    cache, prefix = made(blocks=9)
    order, found = random.Random(0), set()
    beginnings = [text(n, seed=n) for n in (2, 4, 8, 13)]
    evicted, known = 0, 0
    for turn in range(120):
        begin = order.choice(beginnings)
        prompt = begin[: order.randint(1, len(begin))] + text(order.randint(1, 6), seed=turn % 7)
        before = prefix.stats.cached_tokens
        new = order.randint(1, 5)
        cache.fill_unused(float("nan"))
        assert generate_with_prefix(toy(), prompt, new, cache, prefix) == cold(prompt, new)
        found.add((prefix.stats.cached_tokens - before) // 4)
        assert prefix.pool.in_use == 0
        evicted += prefix.cached_blocks < known
        known = prefix.cached_blocks
    assert found >= {0, 1, 2}
    assert evicted


def test_a_closed_stream_gives_its_blocks_back() -> None:
    cache, prefix = made()
    stream = stream_with_prefix(toy(), text(6, seed=6), 9, cache, prefix)
    assert next(stream) == cold(text(6, seed=6), 1)[0]
    assert prefix.pool.in_use == 2
    stream.close()
    assert (prefix.pool.in_use, cache.lengths) == (0, ())


def test_a_stop_token_ends_the_text_before_it() -> None:
    cache, prefix = made()
    prompt = text(6, seed=7)
    whole = cold(prompt, 6)
    stop = whole[3]
    expected = whole[: whole.index(stop)]
    assert generate_with_prefix(toy(), prompt, 6, cache, prefix, stop_tokens=[stop]) == expected
    assert prefix.pool.in_use == 0


def test_running_out_in_the_middle_holds_nothing_afterwards() -> None:
    cache, prefix = made(blocks=2)
    with pytest.raises(OutOfBlocksError):
        generate_with_prefix(toy(), text(6, seed=8), 9, cache, prefix)
    assert (prefix.pool.in_use, cache.lengths) == (0, ())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Identity(salt="a"), Identity(salt="b")),
        (Identity(adapter="a"), Identity(salt="a")),
        (Identity(content=[(0, 2, "a")]), Identity(content=[(0, 2, "b")])),
    ],
)
def test_what_tokens_do_not_say_separates_prompts(a: Identity, b: Identity) -> None:
    cache, prefix = made()
    prompt = text(9, seed=9)
    for identity in (a, b, a):
        generate_with_prefix(toy(), prompt, 1, cache, prefix, identity=identity)
    assert prefix.stats.cached_tokens == 8  # the third prompt's


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 1, "at least one token"),
        ([1, True], 1, "integer token ids"),
        ([1, 99], 1, "from 0 to 28"),
        ([1, 2], 0, "positive integer"),
    ],
)
def test_bad_input_takes_nothing(prompt: list[int], new: int, message: str) -> None:
    cache, prefix = made()
    with pytest.raises(ValueError, match=message):
        stream_with_prefix(toy(), prompt, new, cache, prefix)
    assert prefix.pool.in_use == 0


def test_a_text_longer_than_the_model_takes_nothing() -> None:
    cache, prefix = made(blocks=40)
    with pytest.raises(CacheFullError, match="64"):
        stream_with_prefix(toy(), text(60), 9, cache, prefix)
    assert prefix.pool.in_use == 0


def test_a_cache_that_is_not_the_prefix_s_storage_is_refused() -> None:
    """vllm-project/vllm-omni#6442: the index of cached blocks outlives the storage."""
    cache, prefix = made()
    other, _ = made()
    alone = toy().new_paged_cache(1, BlockPool(4, 4))
    groups = toy(window=(3, None)).new_bound_cache(BlockPool(4, 4), BlockPool(4, 4))
    for wrong, why in ((other, "another pool"), (alone, "slots of its own|has its own"),
                       (groups, "2 groups of layers")):
        with pytest.raises(ValueError, match=why):
            stream_with_prefix(toy(), [1, 2], 1, wrong, prefix)
    assert (prefix.pool.in_use, prefix.stats.prompts) == (0, 0)
    with pytest.raises(ValueError, match="slots of another cache's storage"):
        toy().new_bound_cache(prefix.pool)  # made anew for each request, as that report did
    for _ in range(2):
        assert generate_with_prefix(toy(), text(9), 6, cache, prefix) == cold(text(9), 6)


def test_a_resumed_prompt_is_not_counted_again() -> None:
    cache, prefix = made()
    prompt = text(9, seed=3)
    for resumed in (False, True):
        generate_with_prefix(toy(), prompt, 2, cache, prefix, resumed=resumed)
    assert (prefix.stats.prompts, prefix.stats.prompt_tokens, prefix.stats.cached_tokens) == (
        1, 9, 0,
    )  # fmt: skip


@pytest.mark.parametrize("stops", [5, "5", [True], [29]], ids=str)
def test_stop_tokens_are_looked_at_first(stops: Any) -> None:
    cache, prefix = made()
    with pytest.raises(ValueError, match="stop_tokens"):
        generate_with_prefix(toy(), [1, 2], 3, cache, prefix, stop_tokens=stops)
    assert prefix.stats.prompts == 0


def test_a_stream_that_is_never_started_takes_nothing() -> None:
    cache, prefix = made()
    stream = stream_with_prefix(toy(), text(6, seed=10), 2, cache, prefix)
    assert prefix.pool.in_use == 0
    stream.close()
    assert (prefix.pool.in_use, prefix.stats.prompts) == (0, 0)


def test_streams_over_one_cache_take_turns() -> None:
    cache, prefix = made()
    prompts = [text(6, seed=11), text(9, seed=11)]
    streams = [stream_with_prefix(toy(), prompt, 4, cache, prefix) for prompt in prompts]
    turns = list(zip(*streams, strict=True))
    assert [list(one) for one in zip(*turns, strict=True)] == [cold(p, 4) for p in prompts]
    assert prefix.pool.in_use == 0


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("evicted", [False, True])
def test_a_preempted_generation_goes_on_with_the_same_tokens(length: int, evicted: bool) -> None:
    """GeeeekExplorer/nano-vllm#217: stopped when the text, block 4, has so many tokens."""
    cache, prefix = made(blocks=4)
    prompt, whole = text(2, seed=12), cold(text(2, seed=12), 12)
    stream = stream_with_prefix(toy(), prompt, 12, cache, prefix)
    so_far = [next(stream) for _ in range(length - len(prompt))]
    stream.close()
    if evicted:
        generate_with_prefix(toy(), text(16, seed=13), 1, cache, prefix)
    rest = generate_with_prefix(toy(), prompt + so_far, 12 - len(so_far), cache, prefix)
    assert so_far + rest == whole


# ---- Weak digests


def order_blind(message: bytes) -> bytes:
    return bytes(sorted(message))


class Trusting(PrefixCache):
    """Takes whatever has the key for the block."""

    def confirms(self, cached: object, parent: object, text: bytes) -> bool:
        return True


def last_logits(cache: KVCache, prefix: PrefixCache, prompt: list[int], **key: Any) -> torch.Tensor:
    sequence = prefix.begin(prompt, **key)
    cache.bind([sequence], lengths=[sequence.cached_tokens])
    logits = toy()(torch.tensor([prompt[sequence.cached_tokens :]]), cache)[0, -1]
    prefix.commit(sequence, len(prompt))
    prefix.end(sequence)
    return logits


@lru_cache(maxsize=4096)
def cold_logits(tokens: tuple[int, ...]) -> torch.Tensor:
    return toy()(torch.tensor([tokens]))[0]


@pytest.mark.parametrize(("make", "found", "right"), [(PrefixCache, 0, True), (Trusting, 4, False)])
def test_two_prompts_with_one_key(make: type[PrefixCache], found: int, right: bool) -> None:
    pool = BlockPool(16, 4)
    cache, prefix = toy().new_bound_cache(pool), make(pool, "toy", running(order_blind))
    last_logits(cache, prefix, [1, 2, 3, 4, 5])
    logits = last_logits(cache, prefix, [2, 1, 3, 4, 5])
    error = (logits - cold_logits((2, 1, 3, 4, 5))[-1]).abs().max()
    assert prefix.stats.cached_tokens == found
    assert prefix.stats.collisions == (1 if right else 0)
    assert error < 1e-9 if right else error > 1e-3


# ---- Random schedules


class Server:
    """Three requests over one small pool; each comes, grows, is cut back, waits, and goes.

    Every logit of every forward pass is compared with a pass over the whole text without a cache.
    """

    def __init__(self, seed: int, digest: Callable[[], Digest]) -> None:
        self.order, pool = random.Random(seed), BlockPool(10, 4)
        self.prefix = PrefixCache(pool, "toy", digest)
        self.cache = toy().new_bound_cache(pool)
        self.rows: list[CachedSequence | None] = [None] * 3
        self.seen: Counter[str] = Counter()
        self.stems = [text(n, seed=n) for n in (3, 4, 8, 13)]
        a, b, *rest = self.stems[-1]
        self.stems.append([b, a, *rest])  # the same tokens in another order

    def begin(self, row: int) -> None:
        stem = self.order.choice(self.stems)
        tokens = stem[: self.order.randint(1, len(stem))] if self.order.random() < 0.4 else stem
        tail = text(self.order.randint(1, 3), seed=self.order.randint(0, 3))
        self._start(row, tokens + tail if self.order.random() < 0.7 else tokens)

    def _start(self, row: int, tokens: list[int], resumed: bool = False) -> None:
        known = self.prefix.cached_blocks
        try:
            sequence = self.prefix.begin(tokens, resumed=resumed)
        except OutOfBlocksError:
            self.seen["no room"] += 1
            return
        self.seen["evicted"] += self.prefix.cached_blocks < known
        blocks, most = sequence.cached_tokens // 4, (len(tokens) - 1) // 4
        self.seen["found all" if blocks == most > 0 else "found some" if blocks else "none"] += 1
        self.rows[row] = sequence

    def append(self, row: int, sequence: CachedSequence) -> None:
        try:
            self.prefix.append(sequence, text(self.order.randint(1, 4), self.order.randint(0, 9)))
        except OutOfBlocksError:
            self.seen["no room"] += 1

    def end(self, row: int, sequence: CachedSequence, again: bool) -> None:
        self.prefix.end(sequence)
        self.rows[row] = None
        if again:
            self.seen["resumed"] += 1
            self._start(row, sequence.tokens.tolist(), resumed=True)

    def forward(self) -> None:
        """A chunk for some of the requests; sometimes it is taken back and run again."""
        live = [sequence for sequence in self.rows if sequence]
        batch = self.order.sample(live, self.order.randint(0, len(live)))
        counts = [self.order.randint(0, sequence.new_tokens) for sequence in batch]
        T = max(counts, default=0)
        if T == 0:
            return
        self.seen["waits"] += len(batch) < len(live)
        before = tuple(sequence.written for sequence in batch)
        self.cache.bind(batch, lengths=before)
        inputs = torch.zeros(len(batch), T, dtype=torch.int64)
        for row, (sequence, count) in enumerate(zip(batch, counts, strict=True)):
            written = sequence.written
            inputs[row, T - count :] = torch.tensor(sequence.tokens[written : written + count])
        self.cache.fill_unused(float("nan"))
        logits = toy()(inputs, self.cache, counts=counts)
        if self.order.random() < 0.2:
            self.seen["taken back"] += 1
            self.cache.truncate(before)
            logits = toy()(inputs, self.cache, counts=counts)
        for row, (sequence, count) in enumerate(zip(batch, counts, strict=True)):
            if count:
                end = sequence.written + count
                expected = cold_logits(tuple(sequence.tokens[:end]))[-count:]
                assert (logits[row, T - count :] - expected).abs().max() < 1e-9
                self.seen["swapped"] += len(self.prefix.commit(sequence, end))
        self.seen["together"] += sum(count > 0 for count in counts) > 1

    def step(self) -> None:
        row = self.order.randrange(3)
        sequence = self.rows[row]
        if sequence is None:
            self.begin(row)
        elif self.order.random() < 0.25 or len(sequence.tokens) > 24:
            self.end(row, sequence, again=self.order.random() < 0.4)
        elif self.order.random() < 0.3:
            self.append(row, sequence)
        self.forward()


SEEN = {"none", "found some", "found all", "evicted", "swapped", "no room", "together",
        "resumed", "taken back", "waits"}  # fmt: skip


@pytest.mark.parametrize(
    ("digest", "seen", "collides"),
    [
        (hashlib.sha256, SEEN, False),
        (running(order_blind), SEEN, True),
        (running(lambda message: b"one key for all"), SEEN - {"found all", "swapped"}, True),
    ],
    ids=["sha256", "order_blind", "one_key"],
)
def test_random_schedules_give_the_logits_of_cold_runs(
    digest: Callable[[], Digest], seen: set[str], collides: bool
) -> None:
    server = Server(seed=1, digest=digest)
    for _ in range(600):
        server.step()
    assert {name for name, times in server.seen.items() if times >= 3} >= seen, server.seen
    assert bool(server.prefix.stats.collisions) == collides
