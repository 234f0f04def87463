"""Generation over a prefix cache gives what a cold run gives, whatever was found and evicted."""

import random

import pytest
import torch
from toys import text, toy

from kvbook.cache import BlockPool, KVCache, PrefixCache
from kvbook.errors import CacheFullError, OutOfBlocksError
from kvbook.generate import generate_cached, generate_with_prefix, stream_with_prefix

pytestmark = pytest.mark.usefixtures("one_thread")


def made(blocks: int = 16, block_size: int = 4) -> tuple[KVCache, PrefixCache]:
    pool = BlockPool(blocks, block_size)
    return toy().new_paged_cache(1, pool), PrefixCache(pool, "toy")


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
    assert (prefix.pool.in_use, cache.lengths) == (0, (0,))


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
    assert (prefix.pool.in_use, cache.lengths) == (0, (0,))


def test_tenants_find_only_their_own() -> None:
    cache, prefix = made()
    prompt = text(9, seed=9)
    for salt in ("a", "b", "a"):
        generate_with_prefix(toy(), prompt, 1, cache, prefix, salt=salt)
    assert prefix.stats.cached_tokens == 8  # the third prompt's


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 1, "non-empty"),
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


def test_a_row_in_use_is_refused() -> None:
    cache, prefix = made()
    toy()(torch.tensor([[1, 2]]), cache)
    with pytest.raises(ValueError, match="close the stream"):
        stream_with_prefix(toy(), [1, 2], 1, cache, prefix)
