"""The generation loop, with and without a cache.

Knows: prompts, steps, when to stop. Does not know: layers, attention, where keys are kept.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from kvbook.cache import KVCache
from kvbook.errors import CacheFullError
from kvbook.generate.sampling import Sampler, greedy
from kvbook.model.transformer import Transformer, check_tokens

Prompts = Sequence[Sequence[int]]


def left_pad(rows: Prompts) -> tuple[Tensor, list[int]]:
    """Token lists of any lengths as (B, T) int64 with the padding on the left, and their lengths.

    >>> left_pad([[7, 8, 9], [5]])
    (tensor([[7, 8, 9],
            [0, 0, 5]]), [3, 1])
    """
    if not all(isinstance(row, Sequence) and all(isinstance(t, int) for t in row) for row in rows):
        raise ValueError(
            f"prompts must be lists of integer token ids, one list per row, got {rows!r:.80}; "
            "one prompt is [[1, 2, 3]]"
        )
    counts = [len(row) for row in rows]
    if not counts or min(counts) == 0:
        raise ValueError(
            f"every prompt needs at least one token, got prompts of lengths {counts}; "
            "start from a begin-of-text token if there is no text"
        )
    longest = max(counts)
    padded = [[0] * (longest - len(row)) + list(row) for row in rows]
    return torch.tensor(padded, dtype=torch.int64), counts


def stream_naive(
    model: Transformer, prompts: Prompts, max_new_tokens: int, sampler: Sampler = greedy
) -> Iterator[Tensor]:
    """Yield the next token of every row, (B,), re-feeding the whole text at each step."""
    _check(model, prompts, max_new_tokens)
    return _steps_naive(model, [list(row) for row in prompts], max_new_tokens, sampler)


def _steps_naive(
    model: Transformer, texts: list[list[int]], max_new_tokens: int, sampler: Sampler
) -> Iterator[Tensor]:
    for _ in range(max_new_tokens):
        tokens, counts = left_pad(texts)
        logits = model(tokens.to(model.device), counts=counts, last_only=True)
        chosen = sampler(logits[:, -1])
        yield chosen
        for text, token in zip(texts, chosen.tolist(), strict=True):
            text.append(token)


def stream_cached(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    sampler: Sampler = greedy,
    cache: KVCache | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of every row, (B,): the prompt is read once, then one token a step.

    A ``cache`` that holds earlier text is continued; it must have room for the prompts and all
    new tokens but the last, which is never fed back.
    """
    _check(model, prompts, max_new_tokens)
    tokens, counts = left_pad(prompts)
    if cache is None:
        cache = model.new_cache(len(prompts), max(counts) + max_new_tokens - 1)
    _check_room(cache, counts, max_new_tokens, model.config.max_positions)
    return _steps_cached(model, tokens, counts, max_new_tokens, sampler, cache)


def _steps_cached(
    model: Transformer,
    tokens: Tensor,
    counts: list[int],
    max_new_tokens: int,
    sampler: Sampler,
    cache: KVCache,
) -> Iterator[Tensor]:
    logits = model(tokens.to(model.device), cache, counts=counts, last_only=True)  # prefill
    for remaining in range(max_new_tokens - 1, -1, -1):
        chosen = sampler(logits[:, -1])
        yield chosen
        if remaining:
            logits = model(chosen[:, None], cache, last_only=True)  # decode


def generate_naive(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    sampler: Sampler = greedy,
    stop_tokens: Collection[int] = (),
) -> list[list[int]]:
    """New tokens of each row, without a cache: the same result at a higher price."""
    steps = stream_naive(model, prompts, max_new_tokens, sampler)
    return _collect(steps, len(prompts), stop_tokens)


def generate_cached(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    sampler: Sampler = greedy,
    stop_tokens: Collection[int] = (),
    cache: KVCache | None = None,
) -> list[list[int]]:
    """New tokens of each row, with a KV cache.

    ``prompts`` are lists of token ids and may differ in length. A row ends before the first of
    ``stop_tokens`` that it draws, or at ``max_new_tokens``.
    """
    steps = stream_cached(model, prompts, max_new_tokens, sampler, cache)
    return _collect(steps, len(prompts), stop_tokens)


def _collect(steps: Iterator[Tensor], rows: int, stop_tokens: Collection[int]) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in range(rows)]
    running = set(range(rows))
    for chosen in steps:
        tokens = chosen.tolist()
        running -= {row for row in running if tokens[row] in stop_tokens}
        for row in running:
            texts[row].append(tokens[row])
        if not running:
            break
    return texts


def _check(model: Transformer, prompts: Prompts, max_new_tokens: int) -> None:
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a positive integer, got {max_new_tokens!r}")
    tokens, counts = left_pad(prompts)
    check_tokens(tokens, model.config.vocab_size)
    longest = max(counts) + max_new_tokens - 1
    if longest > model.config.max_positions:
        raise CacheFullError(
            f"a prompt of {max(counts)} tokens and {max_new_tokens} new ones need {longest} "
            f"positions, but the model has {model.config.max_positions}; shorten one of them"
        )


def _check_room(
    cache: KVCache, counts: Sequence[int], max_new_tokens: int, max_positions: int
) -> None:
    if len(cache.lengths) != len(counts):
        raise ValueError(
            f"got {len(counts)} prompts, but the cache has {len(cache.lengths)} active rows; "
            "make a cache for this batch, or choose rows with select()"
        )
    cache.check_room([count + max_new_tokens - 1 for count in counts])
    for row, (length, count) in enumerate(zip(cache.lengths, counts, strict=True)):
        end = length + count + max_new_tokens - 1
        if end > max_positions:
            raise CacheFullError(
                f"row {row} would reach {end} tokens, but the model has {max_positions} positions; "
                "ask for fewer tokens or truncate() the cache"
            )
