"""Generation that starts from what a prefix cache has found.

Knows: when blocks are taken, written and given back. Does not know: keys, tables, layers.

One sequence at a time; several streams over one cache may take turns, since each binds its own
sequence before a step.
"""

from collections.abc import Callable, Collection, Generator, Sequence

import torch

from kvbook.cache import KVCache, PrefixCache
from kvbook.cache.block_key import Identity
from kvbook.cache.prefix import CachedSequence
from kvbook.cache.sizes import check_class
from kvbook.generate.loops import check_request, choose, left_pad
from kvbook.generate.sampling import Sampler, greedy
from kvbook.model.transformer import Transformer, check_tokens

PLAIN = Identity()


def stream_with_prefix(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    cache: KVCache,
    prefix: PrefixCache,
    sampler: Sampler = greedy,
    identity: Identity = PLAIN,
    resumed: bool = False,
) -> Generator[int, None, None]:
    """Yield new tokens of one prompt; what ``prefix`` finds of the prompt is not computed again.

    ``cache`` is one of ``new_bound_cache`` over the pool of ``prefix``. When the stream ends or is
    closed, the full blocks of prompt and answer can be found by the next prompt: a conversation
    goes on by sending all of it again, with the next turn at its end. ``identity`` and ``resumed``
    are those of ``PrefixCache.begin``.

    Raises ``ValueError`` for a bad prompt or a cache of another pool and ``CacheFullError`` for a
    text that is longer than the model, at once; with the first token ``ValueError`` for what
    ``PrefixCache.begin`` refuses, and with any token ``OutOfBlocksError``. Nothing is held then.
    """
    tokens, [count] = left_pad([prompt])
    check_request(model, count, max_new_tokens, (), sampler)
    check_tokens(tokens, model.config.vocab_size)
    check_same_blocks(cache, prefix)

    def begin() -> CachedSequence:
        return prefix.begin(prompt, identity, resumed=resumed)

    return _steps(model, begin, max_new_tokens, cache, prefix, sampler)


def _steps(
    model: Transformer,
    begin: Callable[[], CachedSequence],
    max_new_tokens: int,
    cache: KVCache,
    prefix: PrefixCache,
    sampler: Sampler,
) -> Generator[int, None, None]:
    sequence = begin()  # here, and not before: a stream that is never started takes nothing
    try:
        for step in range(max_new_tokens):
            cache.bind([sequence], lengths=[sequence.written])
            new = [sequence.tokens[sequence.written :].tolist()]
            logits = model(torch.tensor(new, device=model.device), cache, last_only=True)
            prefix.commit(sequence, len(sequence.tokens))
            token = int(choose(sampler, logits)[0])
            yield token
            if step < max_new_tokens - 1:
                prefix.append(sequence, [token])
    finally:
        cache.reset()
        prefix.end(sequence)


def generate_with_prefix(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    cache: KVCache,
    prefix: PrefixCache,
    sampler: Sampler = greedy,
    stop_tokens: Collection[int] = (),
    identity: Identity = PLAIN,
    resumed: bool = False,
) -> list[int]:
    """The new tokens of ``stream_with_prefix``, up to the first of ``stop_tokens``."""
    check_request(model, 1, 1, stop_tokens, sampler)
    stream = stream_with_prefix(
        model, prompt, max_new_tokens, cache, prefix, sampler, identity, resumed
    )
    text = []
    for token in stream:
        if token in stop_tokens:
            break
        text.append(token)
    stream.close()  # gives the blocks back now
    return text


def check_same_blocks(cache: KVCache, prefix: PrefixCache) -> None:
    """Raise ``ValueError`` unless the blocks that the prefix names are those of the cache."""
    check_class("cache", cache, KVCache, "model.new_bound_cache() makes one")
    check_class("prefix", prefix, PrefixCache, "PrefixCache(pool, fingerprint)")
    if len(cache.groups) != 1:
        raise ValueError(
            f"the cache has {len(cache.groups)} groups of layers, each with blocks of its own, but "
            "one PrefixCache finds blocks of one pool; use a model whose layers are of one kind"
        )
    [group] = cache.groups
    group.check_bind([], [])  # rows must be free to take a table
    if group.placement.pools != (prefix.pool,):
        raise ValueError(
            "the prefix cache finds blocks of another pool than the cache was made with; make "
            "both over one BlockPool"
        )
