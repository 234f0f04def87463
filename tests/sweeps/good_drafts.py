"""One right call of everything about draft-and-verify: see good_calls."""

from collections.abc import Callable
from typing import Any

import torch

import kvbook
from sweeps.good_calls import MODEL, good, life, pool_life, simple
from sweeps.wrong_values import Good

DRAFT = kvbook.one_hot([1, 2], 4)

simple("accept_drafts", kvbook.accept_drafts, target=kvbook.one_hot([1, 2, 3], 4), draft=DRAFT,
       drafted=[1, 2], generator=torch.Generator())  # fmt: skip
simple("one_hot", kvbook.one_hot, tokens=[1, 2], vocab_size=4)
simple("first_layers", kvbook.first_layers, model=MODEL, layers=1)
simple("PromptLookup", kvbook.PromptLookup, vocab_size=29, max_ngram=3, min_ngram=2)


@good("ModelDraft")
def _() -> Good:
    return Good(kvbook.ModelDraft, {"model": MODEL, "cache": MODEL.new_cache(1, 20)})


def request(draft: kvbook.PromptLookup, **more: Any) -> dict[str, Any]:
    return {"target": MODEL, "draft": draft, "prompt": [1, 2, 1], "max_new_tokens": 3, "k": 2,
            "sampler": kvbook.greedy, "stop_tokens": [28], **more}  # fmt: skip


def of_both(draft: kvbook.PromptLookup, state: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: (list(draft.text), state())


@good("speculate")
def _() -> Good:
    cache, draft = MODEL.new_cache(1, 12), kvbook.PromptLookup(29)
    arguments = request(draft, cache=cache)
    return Good(kvbook.speculate, arguments, of_both(draft, life(cache)))


@good("speculate_with_prefix")
def _() -> Good:
    pool, draft = kvbook.BlockPool(8, 4), kvbook.PromptLookup(29)
    cache, prefix = MODEL.new_bound_cache(pool), kvbook.PrefixCache(pool, "toy")
    arguments = request(draft, cache=cache, prefix=prefix, resumed=False)
    return Good(kvbook.speculate_with_prefix, arguments, of_both(draft, pool_life(pool)))

