"""The generation loop, with and without a cache.

Knows: prompts, steps, when to stop. Does not know: layers, attention, where keys are kept.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvbook.cache import KVCache
from kvbook.cache.sizes import check_class
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
    if not isinstance(rows, Sequence) or not all(
        isinstance(row, Sequence)
        and not isinstance(row, bytes | bytearray)
        and all(type(token) is int for token in row)
        for row in rows
    ):
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
    _check(model, prompts, max_new_tokens, sampler)
    return _steps_naive(model, [list(row) for row in prompts], max_new_tokens, sampler)


def _steps_naive(
    model: Transformer, texts: list[list[int]], max_new_tokens: int, sampler: Sampler
) -> Iterator[Tensor]:
    for _ in range(max_new_tokens):
        tokens, counts = left_pad(texts)
        logits = model(tokens.to(model.device), counts=counts, last_only=True)
        chosen = choose(sampler, logits)
        yield chosen
        for text, token in zip(texts, chosen.tolist(), strict=True):
            text.append(token)


def stream_cached(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    sampler: Sampler = greedy,
    cache: KVCache | None = None,
    stop_tokens: Collection[int] = (),
) -> Iterator[Tensor]:
    """Yield the next token of every row, (B,): the prompt is read once, then one token a step.

    A ``cache`` that holds earlier text is continued; it must have room for the prompts and all
    new tokens but the last, which is never fed back. A row that has drawn one of ``stop_tokens``
    takes nothing more; what is yielded for it from then on means nothing. The stream ends when
    every row has. If it fails before the first token, the cache holds again what it held; later it
    holds the prompts and the tokens that were yielded, but for the last.
    """
    _check(model, prompts, max_new_tokens, sampler, stop_tokens)
    tokens, counts = left_pad(prompts)
    if cache is None:
        cache = model.new_cache(len(prompts), max(counts) + max_new_tokens - 1)
    check_room(cache, [count + max_new_tokens - 1 for count in counts], model)
    return _steps_cached(model, tokens, counts, max_new_tokens, sampler, cache, stop_tokens)


def _steps_cached(
    model: Transformer,
    tokens: Tensor,
    counts: list[int],
    max_new_tokens: int,
    sampler: Sampler,
    cache: KVCache,
    stop_tokens: Collection[int],
) -> Iterator[Tensor]:
    with all_or_nothing(cache):
        logits = model(tokens.to(model.device), cache, counts=counts, last_only=True)  # prefill
        chosen = choose(sampler, logits)
    yield chosen
    running = [1] * len(counts)  # new tokens that each row still takes per step
    for _ in range(max_new_tokens - 1):
        if stop_tokens:
            drawn = zip(running, chosen.tolist(), strict=True)
            running = [int(takes and token not in stop_tokens) for takes, token in drawn]
        if not any(running):
            return
        with all_or_nothing(cache):
            logits = model(chosen[:, None], cache, counts=running, last_only=True)  # decode
            chosen = choose(sampler, logits)
        yield chosen


def generate_naive(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    sampler: Sampler = greedy,
    stop_tokens: Collection[int] = (),
) -> list[list[int]]:
    """New tokens of each row, without a cache: the same result at a higher price."""
    _check(model, prompts, max_new_tokens, sampler, stop_tokens)
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

    A ``cache`` that is given is continued: prompts come after the text that it holds, so a second
    call with the same cache is the next turn of a conversation, and ``cache.reset()`` begins
    another. Afterwards each row holds exactly what it held, its prompt and the tokens that are
    returned; it needs room for all of them. If the call fails, the cache holds again what it held
    before; where a window has let that go, the error says so.
    """
    steps = stream_cached(model, prompts, max_new_tokens, sampler, cache, stop_tokens)
    if cache is None:
        return _collect(steps, len(prompts), stop_tokens)
    counts = [len(prompt) for prompt in prompts]
    check_room(cache, [count + max_new_tokens for count in counts], model)
    with all_or_nothing(cache):
        before = cache.lengths
        texts = _collect(steps, len(prompts), stop_tokens)
        # A row that went to the limit has not read its last token; one that met a stop token has.
        ends = [sum(row) for row in zip(before, counts, map(len, texts), strict=True)]
        unread = [end - n for end, n in zip(ends, cache.lengths, strict=True)]
        if any(unread):
            last = torch.tensor([[text[-1] if text else 0] for text in texts], device=model.device)
            model(last, cache, counts=unread, last_only=True)
    return texts


def choose(sampler: Sampler, logits: Tensor) -> Tensor:
    """The next token of each row, (B,), from logits (B, 1, V) of its last position.

    Raises ``ValueError`` for what is no tensor of one token per row. Two numbers are read back,
    after the sampler has waited for the logits already.
    """
    chosen = sampler(logits[:, -1])
    rows, vocab_size = len(logits), logits.shape[-1]
    if (
        not isinstance(chosen, Tensor)
        or chosen.shape != (rows,)
        or chosen.dtype != torch.int64
        or not 0 <= int(chosen.min()) <= int(chosen.max()) < vocab_size
    ):
        raise ValueError(
            f"the sampler gave {chosen!r:.80} for {rows} rows; it must give one token for each, as "
            f"an int64 tensor (B,) of numbers from 0 to {vocab_size - 1}"
        )
    return chosen


@contextmanager
def all_or_nothing(cache: KVCache) -> Iterator[None]:
    """If what is inside fails, the cache is taken back to what it held before.

    Where it cannot be, because a window has let tokens go, a note on the error says so.
    """
    before = cache.lengths
    try:
        yield
    except BaseException as error:
        try:
            cache.truncate(before)
        except ValueError as lost:
            error.add_note(
                f"the cache could not be taken back to {list(before)} tokens ({lost}); reset() "
                "empties it"
            )
        raise


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


def check_request(
    model: Transformer,
    longest: int,
    max_new_tokens: int,
    stop_tokens: Collection[int],
    sampler: Sampler,
) -> None:
    """Raise ``ValueError`` unless so many new tokens can follow a prompt of ``longest`` tokens.

    Raises ``CacheFullError`` if the model has too few positions.
    """
    check_class("model", model, Transformer, "load_smollm2() or Transformer(config)")
    if not callable(sampler):
        raise ValueError(f"sampler must be a Sampler, got {sampler!r:.80}")
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a positive integer, got {max_new_tokens!r}")
    known = isinstance(stop_tokens, list | tuple | set | frozenset) and all(
        type(token) is int and 0 <= token < model.config.vocab_size for token in stop_tokens
    )
    if not known:
        raise ValueError(
            f"stop_tokens must be a list or set of token ids from 0 to "
            f"{model.config.vocab_size - 1}, got {stop_tokens!r:.80}; one token is [token]"
        )
    end = longest + max_new_tokens - 1
    if end > model.config.max_positions:
        raise CacheFullError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones need {end} positions, "
            f"but the model has {model.config.max_positions}; shorten one of them"
        )


def _check(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    sampler: Sampler,
    stop_tokens: Collection[int] = (),
) -> None:
    tokens, counts = left_pad(prompts)
    check_request(model, max(counts), max_new_tokens, stop_tokens, sampler)
    check_tokens(tokens, model.config.vocab_size)


def check_room(cache: KVCache, counts: Sequence[int], model: Transformer) -> None:
    """Raise ``CacheFullError`` unless each row can take so many more tokens."""
    check_class("cache", cache, KVCache, "model.new_cache() makes one")
    if len(cache.lengths) != len(counts):
        raise ValueError(
            f"got {len(counts)} prompts, but the cache has {len(cache.lengths)} active rows; "
            "make a cache for this batch, or choose rows with select()"
        )
    cache.check_room(counts)
    for row, (length, count) in enumerate(zip(cache.lengths, counts, strict=True)):
        if length + count > model.config.max_positions:
            raise CacheFullError(
                f"row {row} would reach {length + count} tokens, but the model has "
                f"{model.config.max_positions} positions; ask for fewer tokens or truncate() the "
                "cache"
            )
