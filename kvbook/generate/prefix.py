"""Generation that starts from what a prefix cache has found.

Knows: when blocks are taken, written and given back. Does not know: keys, tables, layers.

One sequence at a time, in the only row of a paged cache.
"""

from collections.abc import Callable, Collection, Generator, Sequence

import torch

from kvbook.cache import KVCache, PrefixCache
from kvbook.cache.block_key import Part, Span
from kvbook.cache.prefix import CachedSequence
from kvbook.errors import CacheFullError
from kvbook.generate.sampling import Sampler, greedy
from kvbook.model.transformer import Transformer, check_tokens


def stream_with_prefix(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    cache: KVCache,
    prefix: PrefixCache,
    sampler: Sampler = greedy,
    adapter: Part = None,
    salt: Part = None,
    content: Sequence[Span] = (),
) -> Generator[int, None, None]:
    """Yield new tokens of one prompt; what ``prefix`` finds of the prompt is not computed again.

    ``cache`` has one row, placed by ``Paged`` over the pool of ``prefix``. The row is empty again
    when the stream ends or is closed, and its full blocks can be found by the next prompt.
    ``adapter``, ``salt`` and ``content`` are those of ``PrefixCache.begin``.

    Raises ``ValueError`` for a bad prompt or a cache that is in use and ``CacheFullError`` for a
    text that is longer than the model, at once; with the first token ``ValueError`` for what
    ``PrefixCache.begin`` refuses, and with any token ``OutOfBlocksError``. Nothing is held then.
    """
    check_tokens(torch.tensor([list(prompt)], dtype=torch.int64), model.config.vocab_size)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a positive integer, got {max_new_tokens!r}")
    if cache.lengths != (0,):
        raise ValueError(
            f"a prompt starts in the one empty row of a cache, but lengths are {cache.lengths}; "
            "make a paged cache for a batch of 1, and close the stream before"
        )
    end = len(prompt) + max_new_tokens - 1
    if end > model.config.max_positions:
        raise CacheFullError(
            f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones need {end} positions, "
            f"but the model has {model.config.max_positions}; shorten one of them"
        )

    def begin() -> CachedSequence:
        return prefix.begin(prompt, adapter=adapter, salt=salt, content=content)

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
        cache.adopt(0, sequence.blocks, sequence.cached_tokens)
        try:
            for step in range(max_new_tokens):
                new = [sequence.tokens[sequence.written :].tolist()]
                logits = model(torch.tensor(new, device=model.device), cache, last_only=True)
                prefix.commit(sequence, len(sequence.tokens))
                token = int(sampler(logits[:, -1])[0])
                yield token
                if step < max_new_tokens - 1:
                    prefix.append(sequence, [token])
        finally:
            cache.release(0)
    finally:
        prefix.end(sequence)


def generate_with_prefix(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    cache: KVCache,
    prefix: PrefixCache,
    sampler: Sampler = greedy,
    stop_tokens: Collection[int] = (),
    adapter: Part = None,
    salt: Part = None,
    content: Sequence[Span] = (),
) -> list[int]:
    """The new tokens of ``stream_with_prefix``, up to the first of ``stop_tokens``."""
    stream = stream_with_prefix(
        model, prompt, max_new_tokens, cache, prefix, sampler, adapter, salt, content
    )
    text = []
    for token in stream:
        if token in stop_tokens:
            break
        text.append(token)
    stream.close()  # gives the blocks back now
    return text
