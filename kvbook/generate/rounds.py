"""Draft and verify: several tokens for one pass of the target.

Knows: rounds, when to stop, who is told what. Does not know: how drafts are made, where keys are
kept, who accepts.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from kvbook.cache import KVCache, PrefixCache
from kvbook.cache.block_key import Identity
from kvbook.cache.prefix import CachedSequence
from kvbook.cache.sizes import check_class
from kvbook.generate.accept import accept_drafts, one_hot
from kvbook.generate.draft import Draft, Proposal, check_rollback, generator_of
from kvbook.generate.loops import all_or_nothing, check_request, check_room, left_pad
from kvbook.generate.prefix import PLAIN, check_same_blocks
from kvbook.generate.sampling import Sampler, greedy
from kvbook.generate.speculation import Speculation
from kvbook.generate.verify import InCache, InPrefixCache, Verification
from kvbook.model.transformer import Transformer, check_tokens


def speculate(
    target: Transformer,
    draft: Draft,
    prompt: Sequence[int],
    max_new_tokens: int,
    k: int = 4,
    sampler: Sampler = greedy,
    stop_tokens: Collection[int] = (),
    cache: KVCache | None = None,
) -> Speculation:
    """New tokens of one prompt, as ``target`` alone would choose them, in fewer of its passes.

    In each round ``draft`` proposes up to ``k`` tokens, the target reads all of them at once, and
    ``accept_drafts`` says how many stand. With the greedy sampler the text is that of
    ``generate_cached``, but for near ties in low precision: a pass over k + 1 tokens may sum in
    another order than one over a single token. Otherwise it has the same distribution, and is
    another draw from it. Target and draft choose by the same ``sampler``, which has one generator.

    The text ends before the first of ``stop_tokens``, accepted drafts included. A ``cache`` that is
    given is continued, and holds exactly the prompt and the returned tokens afterwards, as after
    ``generate_cached``; the draft must know the text that it holds, or nothing if it is empty. Any
    kind of cache will do that can take ``k`` tokens back: rings need as much rollback, stores that
    encode groups of tokens as long a tail. A tail before a lossy store sees several tokens come at
    once, so there the text may differ from the plain one, by the code's error.

    Raises ``ValueError`` for a vocabulary that is not the target's, for ``k`` below 1 or beyond
    what a cache can take back, and for what ``generate_cached`` refuses; nothing has changed then.
    If the call fails later, cache and draft hold again what they held before; where a window has
    let that go, the error says so.
    """
    count = _check(target, prompt, max_new_tokens, k, sampler, stop_tokens)
    mine = target.new_cache(1, count + max_new_tokens - 1) if cache is None else cache
    check_room(mine, [count + max_new_tokens - (cache is None)], target)
    check_rollback(mine, k)
    held = mine.lengths[0]
    _check_draft(target, draft, held, count + max_new_tokens - 2, k)
    verification = InCache(target, mine)
    with _told_all_or_nothing(draft), all_or_nothing(mine):
        run = _rounds(verification, draft, prompt, max_new_tokens, k, sampler, stop_tokens)
        if cache is not None and cache.lengths[0] < held + count + len(run.tokens):
            verification.read(run.tokens[-1:], [])  # at the limit, the last token is not read yet
    return run


def speculate_with_prefix(
    target: Transformer,
    draft: Draft,
    prompt: Sequence[int],
    max_new_tokens: int,
    cache: KVCache,
    prefix: PrefixCache,
    k: int = 4,
    sampler: Sampler = greedy,
    stop_tokens: Collection[int] = (),
    identity: Identity = PLAIN,
    resumed: bool = False,
) -> Speculation:
    """``speculate`` from what ``prefix`` finds of the prompt, as ``generate_with_prefix`` does.

    ``cache`` is one of ``new_bound_cache`` over the pool of ``prefix``. Rejected drafts are
    retracted before anything is committed: blocks that can be found hold text that stands. The
    draft knows no text yet, and reads the whole prompt.

    Raises what ``speculate`` and ``generate_with_prefix`` raise. When it is done, or has failed,
    the sequence holds no block.
    """
    count = _check(target, prompt, max_new_tokens, k, sampler, stop_tokens)
    check_same_blocks(cache, prefix)
    check_rollback(cache, k)
    _check_draft(target, draft, 0, count + max_new_tokens - 2, k)

    def begin(tokens: Sequence[int]) -> CachedSequence:
        return prefix.begin(tokens, identity, resumed=resumed)

    verification = InPrefixCache(target, cache, prefix, begin)
    try:
        with _told_all_or_nothing(draft):
            return _rounds(verification, draft, prompt, max_new_tokens, k, sampler, stop_tokens)
    finally:
        verification.end()


def _rounds(
    verification: Verification,
    draft: Draft,
    prompt: Sequence[int],
    max_new_tokens: int,
    k: int,
    sampler: Sampler,
    stop_tokens: Collection[int],
) -> Speculation:
    tokens: list[int] = []
    proposed, accepted = [], []
    generator, drafts = generator_of(sampler), _nothing(draft)
    unread, untold = list(prompt), list(prompt)  # by the target, to the draft
    while True:
        logits = verification.read(unread, drafts.tokens)  # (k + 1, V)
        stood, following = accept_drafts(
            sampler.probabilities(logits), drafts.probabilities, drafts.tokens, generator
        )
        proposed.append(len(drafts.tokens))
        accepted.append(stood)
        run = [*drafts.tokens[:stood], following]
        new = list(takewhile(lambda token: token not in stop_tokens, run))
        verification.keep(min(stood, len(new)))
        draft.extend([*untold, *new])
        tokens += new
        left = max_new_tokens - len(tokens)
        if len(new) < len(run) or not left:
            return Speculation(tokens, tuple(proposed[1:]), tuple(accepted[1:]))
        unread, untold = new[-1:], []
        # One more than the drafts may come of a round, so the last token needs none.
        drafts = _propose(draft, min(k, left - 1), sampler)


@contextmanager
def _told_all_or_nothing(draft: Draft) -> Iterator[None]:
    """If what is inside fails, the draft knows the text that it knew before."""
    before = draft.length
    try:
        yield
    except BaseException:
        draft.truncate(before)
        raise


def _propose(draft: Draft, k: int, sampler: Sampler) -> Proposal:
    """Up to ``k`` drafts, none if it is 0. Raises ``ValueError`` for more than were asked for."""
    if k == 0:
        return _nothing(draft)
    drafts = draft.propose(k, sampler)
    if len(drafts.tokens) > k:
        raise ValueError(
            f"{type(draft).__name__} was asked for up to {k} drafts and proposed "
            f"{len(drafts.tokens)}, for which there may be no room; let it propose fewer"
        )
    return drafts


def _nothing(draft: Draft) -> Proposal:
    return Proposal([], one_hot([], draft.vocab_size))


def _check(
    target: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    k: int,
    sampler: Sampler,
    stop_tokens: Collection[int],
) -> int:
    """The number of tokens in the prompt. Raises ``ValueError`` for what no cache can mend."""
    tokens, [count] = left_pad([prompt])
    check_class("sampler", sampler, Sampler, "its probabilities decide which drafts stand")
    check_request(target, count, max_new_tokens, stop_tokens, sampler)
    check_tokens(tokens, target.config.vocab_size)
    generator_of(sampler)
    if type(k) is not int or k < 1:
        raise ValueError(
            f"k, the most drafts in a round, must be a positive integer, got {k!r:.60}; "
            "generate_cached() writes without drafts"
        )
    return count


def _check_draft(target: Transformer, draft: Draft, held: int, tokens: int, k: int) -> None:
    """Raise ``ValueError`` unless the draft can follow the text that the cache holds."""
    check_class("draft", draft, Draft, "PromptLookup(vocab_size), or ModelDraft(model, cache)")
    ours, theirs = target.config.vocab_size, draft.vocab_size
    if ours != theirs:
        raise ValueError(
            f"the draft has a vocabulary of {theirs} tokens, the target one of {ours}; drafts are "
            "compared token by token, so take a draft with the target's tokenizer"
        )
    if draft.length != held:
        raise ValueError(
            f"the draft knows a text of {draft.length} tokens, but the cache holds {held}; reset() "
            "the draft for a new text, or go on with the cache that it was used with"
        )
    draft.check_room(tokens, k)
