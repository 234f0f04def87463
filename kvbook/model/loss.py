"""How surprised a model is by each token of a text.

Knows: logits, which token came next, that a NaN is no loss. Does not know: what a cache keeps of
the past.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvbook.cache import KVCache
from kvbook.errors import CacheFullError
from kvbook.model.arguments import check_is
from kvbook.model.finite import RefuseNaN, refuse_nan
from kvbook.model.transformer import Transformer, check_tokens


def token_losses(
    model: Transformer, tokens: Tensor, cache: KVCache | None = None, chunk: int = 128
) -> Tensor:
    """-log p(token i + 1 given tokens 0 … i) for int64 ``tokens`` (n,): float64 (n - 1,), in nats.

    Entry i is the loss of token i + 1: the first token is given, the last one only predicted.
    The model reads the text through ``cache``, which may hold a past of one row, in chunks of
    ``chunk`` tokens; by default through a new cache that keeps everything. Afterwards the cache
    holds all tokens but the last.

    Raises ``ValueError`` for tokens that are not a line of at least two ids of the vocabulary,
    a chunk below 1 or a cache of several rows, and ``CacheFullError`` when the cache or the
    model's positions are too few; nothing has changed then. Raises ``ValueError`` for a NaN in the
    logits or in what attention reads, be it of this text or of the past. After that, as after any
    error midway, the cache is taken back to where it was; where a window has let the past go, the
    error says so and the cache keeps the chunks that were read.
    """
    check_is("model", model, Transformer)
    if not isinstance(tokens, Tensor) or tokens.ndim != 1:
        got = tuple(tokens.shape) if isinstance(tokens, Tensor) else f"{tokens!r:.80}"
        raise ValueError(
            f"tokens must be an int64 tensor of shape (n,), got {got}; one text is "
            "torch.tensor(ids)"
        )
    check_tokens(tokens[None], model.config.vocab_size)
    read = len(tokens) - 1
    if read < 1:
        raise ValueError("a loss needs a token and the one after it, got 1 token; give at least 2")
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"chunk must be a positive integer, got {chunk!r}")
    cache = model.new_cache(1, read) if cache is None else cache
    check_is("cache", cache, KVCache)
    if len(cache.lengths) != 1:
        raise ValueError(
            f"the cache has {len(cache.lengths)} active rows, but one text is read; make it for "
            "a batch of 1, or choose a row with select()"
        )
    cache.check_room([read])
    if cache.lengths[0] + read > model.config.max_positions:
        raise CacheFullError(
            f"the text would reach {cache.lengths[0] + read} tokens, but the model has "
            f"{model.config.max_positions} positions; shorten it"
        )
    before = cache.lengths[0]
    try:
        with RefuseNaN():
            return _read(model, tokens, cache, chunk)
    except BaseException as error:
        _take_back(cache, before, error)
        raise


def _read(model: Transformer, tokens: Tensor, cache: KVCache, chunk: int) -> Tensor:
    losses = []
    for start in range(0, len(tokens) - 1, chunk):  # all logits at once would fill the memory
        stop = min(start + chunk, len(tokens) - 1)
        logits = model(tokens[None, start:stop], cache)[0]
        # In float64, so that a mean over many tokens has no rounding of its own.
        part = cross_entropy(logits.double(), tokens[start + 1 : stop + 1], reduction="none")
        losses.append(refuse_nan(f"losses of tokens {start + 1} to {stop}", part))
    return torch.cat(losses)


def _take_back(cache: KVCache, length: int, error: BaseException) -> None:
    try:
        cache.truncate(length)
    except ValueError as refused:
        error.add_note(
            f"the cache could not be taken back to {length} tokens ({refused}); it holds "
            f"{cache.lengths[0]}: reset() it, or make a new one"
        )
