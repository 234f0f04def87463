"""Drafts are taken back on every kind of cache, and nothing of them is left."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles.cache_kinds import PLACEMENTS, STORES, by_the_model, fits, list_cache
from oracles.drafting import Scripted, greedy_rounds, greedy_text
from oracles.toys import LATENT, reference_logits, snapshot, text, toy, unchanged

from kvbook.cache import (
    INT8,
    BlockPool,
    DenseStore,
    KVCache,
    PrefixCache,
    Ring,
    TailedGroup,
    quantized,
)
from kvbook.errors import OutOfBlocksError
from kvbook.generate import (
    ModelDraft,
    PromptLookup,
    Proposal,
    Sampler,
    first_layers,
    generate_with_prefix,
    speculate,
    speculate_with_prefix,
)
from kvbook.generate.sampling import seeded
from kvbook.generate.verify import InCache, InPrefixCache
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
V, NEW = 29, 13
PROMPT = text(5, seed=1)
MODELS: list[dict[str, Any]] = [
    {"window": 3, "sinks": 2}, {"n_layers": 3, "window": (3, None, 8)}, LATENT,
]  # fmt: skip


def drafts_for(model: Transformer, truth: Sequence[int], k: int) -> list[Any]:
    early = first_layers(model, 1)
    return [
        Scripted(V, truth, [*range(k + 1), 0]),  # every number of accepted drafts
        ModelDraft(early, early.new_cache(1, 60)),
        PromptLookup(V),
    ]


def poison_before_drafts(draft: Any, cache: KVCache) -> None:
    plain = draft.propose

    def propose(k: int, sampler: Sampler) -> Proposal:
        cache.fill_unused(float("nan"))
        return plain(k, sampler)  # type: ignore[no-any-return]

    draft.propose = propose


# ---- Placements and stores


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("store", [name for name, kind in STORES.items() if kind.tile == 1])
@pytest.mark.parametrize("placement", ["contiguous", "ring", "paged, blocks of 4"])
def test_the_text_is_the_plain_one_on_every_kind_of_cache(
    placement: str, store: str, k: int
) -> None:
    """Unused slots hold NaN whenever drafts are made: what was rejected is never read."""
    stored = STORES[store]
    # A lossy store settles tokens by the size of a step: see the next test.
    stored = replace(stored, tail=0) if not stored.is_exact else stored
    placed = PLACEMENTS.get(placement, by_the_model(k))
    model = toy(seed=k, **MODELS[(k + len(store)) % len(MODELS)])
    expected = greedy_text(model, PROMPT, NEW, stored.keys)
    for draft in drafts_for(model, PROMPT + expected, k):
        cache = placed.new(model, 1, len(PROMPT) + NEW, stored)
        address = [tensor.data_ptr() for tensor in cache.tensors]
        poison_before_drafts(draft, cache)
        run = speculate(model, draft, PROMPT, NEW, k, cache=cache)
        assert run.tokens == expected
        assert cache.lengths == (len(PROMPT) + NEW,) == (draft.length,)
        # huggingface/transformers#30312: the storage is what it was.
        assert [tensor.data_ptr() for tensor in cache.tensors] == address


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("store", ["int4, tail of 2", "int8 keys per channel, tail of 3"])
@pytest.mark.parametrize("placement", ["contiguous", "ring", "paged, blocks of 4"])
def test_behind_a_tail_the_text_is_that_of_lists_read_in_the_same_steps(
    placement: str, store: str, k: int
) -> None:
    """There a step of k + 1 tokens settles what single steps would still hold exactly."""
    stored = replace(STORES[store], tail=max(k, STORES[store].tail))
    placed = PLACEMENTS.get(placement, by_the_model(k + k % 2))  # rings of whole tiles
    model = toy(seed=k, window=(3, None))
    placed, stored = (placed, stored) if fits(placed, stored, model) else (
        PLACEMENTS["contiguous"], stored)  # fmt: skip
    script = [*range(k + 1), 0]

    def propose(sofar: list[int], n: int) -> list[int]:
        place = wrong.pop(0) if len(wrong) > 1 else wrong[0]
        tokens = guess[len(sofar) : len(sofar) + n]
        if n and place < n:
            tokens[place] = (tokens[place] + 1) % V
        return tokens

    # The lists' own text, found by guessing until nothing changes: drafts depend on it.
    guess = PROMPT + greedy_text(model, PROMPT, NEW)
    wrong = list(script)
    lists = list_cache(placed, stored, model, 1)
    expected = greedy_rounds(model, lists, PROMPT, NEW, k, propose)
    draft = Scripted(V, guess, script)
    cache = placed.new(model, 1, len(PROMPT) + NEW, stored)
    run = speculate(model, draft, PROMPT, NEW, k, cache=cache)
    assert run.tokens == expected
    assert cache.lengths == (len(PROMPT) + NEW,)


# ---- A cache that cannot take the drafts back is refused


def ring_with_tail(model: Transformer, rollback: int, tail: int) -> KVCache:
    kind = model.layer_kinds[0]
    ring = Ring(1, kind.window or 0, rollback, kind.sinks)
    layers = len(model.layer_kinds)
    return KVCache(TailedGroup(ring, DenseStore(kind, layers, *ring.store_shape), tail))


PER_CHANNEL = quantized(INT8.per_channel(2), INT8.grouped(3))


@pytest.mark.parametrize(
    ("rollback", "make"),
    [
        (1, lambda m: m.new_cache(1, 40, rollback=1)),
        (3, lambda m: m.new_cache(1, 40, rollback=3)),
        (2, lambda m: m.new_cache(1, 40, rollback=2, store=quantized(INT8.grouped(3)))),
        (0, lambda m: m.new_cache(1, 40, store=PER_CHANNEL)),
        (3, lambda m: m.new_cache(1, 40, store=PER_CHANNEL, tail=3)),
        (3, lambda m: m.new_paged_cache(1, BlockPool(20, 4), store=PER_CHANNEL, tail=3)),
        (5, lambda m: ring_with_tail(m, 2, 3)),
        (None, lambda m: m.new_cache(1, 40)),
        (None, lambda m: m.new_cache(1, 40, tail=3)),
        (None, lambda m: m.new_paged_cache(1, BlockPool(20, 4))),
    ],
)
def test_a_cache_says_how_much_it_can_take_back(
    rollback: int | None, make: Callable[[Transformer], KVCache]
) -> None:
    """And that is true: so many drafts give the plain text, and one more is refused unread."""
    model = toy(window=3)
    truth = PROMPT + greedy_text(model, PROMPT, 20)
    assert make(model).rollback == rollback
    for k in range(1, 9):
        cache, draft = make(model), Scripted(V, truth, [0, k, 0, k - 1, 0])
        if rollback is None or k <= rollback:
            run = speculate(model, draft, PROMPT, 20, k, cache=cache)
            assert cache.lengths == (25,)
            assert len(run.tokens) == 20
        else:
            before = snapshot(cache)
            with pytest.raises(ValueError, match=f"{k} tokens may have to be taken back"):
                speculate(model, draft, PROMPT, 20, k, cache=cache)
            assert unchanged(cache, before)
            assert draft.length == 0


def test_the_least_of_the_groups_counts() -> None:
    model = toy(n_layers=3, window=(3, None, 8))
    assert model.new_cache(1, 40, rollback=2).rollback == 2
    assert model.new_cache(1, 40).rollback is None


def test_a_draft_takes_back_one_less_than_it_proposes() -> None:
    model = toy(window=3)
    expected = greedy_text(model, PROMPT, NEW)
    for k in range(2, 6):
        draft = ModelDraft(model, model.new_cache(1, 40, rollback=k - 1))
        assert speculate(model, draft, PROMPT, NEW, k).tokens == expected
        draft = ModelDraft(model, model.new_cache(1, 40, rollback=k - 1))
        with pytest.raises(ValueError, match=f"{k} tokens may have to be taken back"):
            speculate(model, draft, PROMPT, NEW, k + 1)
        assert draft.length == 0


# ---- What a round leaves behind


@pytest.mark.parametrize("kept", range(5))
@pytest.mark.parametrize("make", [
    lambda m: m.new_cache(1, 30), lambda m: m.new_cache(1, 30, rollback=4),
    lambda m: m.new_paged_cache(1, BlockPool(16, 2)), lambda m: m.new_cache(1, 30, tail=3),
])  # fmt: skip
def test_after_any_rejection_the_next_logits_are_those_of_a_run_without_drafts(
    make: Callable[[Transformer], KVCache], kept: int
) -> None:
    """paiml/aprender#2014: rolled back to the snapshot, not to nothing."""
    model = toy(window=3)
    verification = InCache(model, make(model))
    verification.read(PROMPT, [])
    verification.keep(0)
    drafts = text(4, seed=8)
    logits = verification.read([7], drafts)
    assert (logits - reference_logits(model, [*PROMPT, 7, *drafts])[-5:]).abs().max() < 1e-9
    verification.keep(kept)
    logits = verification.read([9], [])
    expected = reference_logits(model, [*PROMPT, 7, *drafts[:kept], 9])[-1:]
    assert (logits - expected).abs().max() < 1e-9


@pytest.mark.parametrize("k", range(1, 6))
def test_target_and_draft_hold_the_same_text_after_every_number_of_accepted_drafts(k: int) -> None:
    """The draft's keys are those of the text that stands, whatever it had read beyond."""
    target, seen = toy(seed=1), set()
    for noise in (0.0, 0.03, 0.1, 0.3):
        small = toy(seed=1 + int(noise * 1e6))
        generator = torch.Generator().manual_seed(k)
        for mine, theirs in zip(small.parameters(), target.parameters(), strict=True):
            mine.copy_(theirs * (1 + noise * torch.randn(theirs.shape, generator=generator)))
        draft, cache = ModelDraft(small, small.new_cache(1, 60)), target.new_cache(1, 60)
        plain = draft.extend

        def checked(tokens: Sequence[int], draft: Any = draft, plain: Any = plain) -> None:
            plain(tokens)
            n = draft.cache.lengths[0]
            assert n == 0 or draft.length - 3 <= n < draft.length  # 1 to 3: not asked at the end
            fresh = draft.model.new_cache(1, 60)
            if n:
                draft.model(torch.tensor([draft.text[:n]]), fresh)
            for layer in range(2):
                pairs = zip(draft.cache.entries(layer), fresh.entries(layer), strict=True)
                assert all((a - b).abs().sum() < 1e-9 for a, b in pairs)

        draft.extend = checked  # type: ignore[method-assign]
        run = speculate(target, draft, PROMPT, 24, k, cache=cache)
        assert run.tokens == greedy_text(target, PROMPT, 24)
        assert cache.lengths == (29,) == (draft.length,)
        seen |= set(run.accepted)
    assert seen == set(range(k + 1))


# ---- Sequences of a prefix cache


def made(model: Transformer, blocks: int = 16) -> tuple[KVCache, PrefixCache]:
    pool = BlockPool(blocks, 4)
    return model.new_bound_cache(pool), PrefixCache(pool, "toy")


@pytest.mark.parametrize("k", range(1, 7))
def test_a_prefix_cached_text_is_the_plain_one(k: int) -> None:
    model = toy(seed=k)
    cache, prefix = made(model)
    system = text(9, seed=2)
    for turn, question in enumerate((text(3, seed=3), text(4, seed=4))):
        prompt = system + question
        expected = greedy_text(model, prompt, NEW)
        for draft in drafts_for(model, prompt + expected, k):
            poison_before_drafts(draft, cache)
            run = speculate_with_prefix(model, draft, prompt, NEW, cache, prefix, k)
            assert run.tokens == expected
            assert (prefix.pool.in_use, cache.lengths) == (0, ())
        assert prefix.stats.cached_tokens >= 8 * turn
    # What was written is found, by plain generation too, and it is right.
    assert generate_with_prefix(model, prompt + expected, 3, cache, prefix) == greedy_text(
        model, prompt + expected, 3
    )


def test_no_block_with_a_rejected_draft_can_be_found() -> None:
    """All drafts are wrong and fill blocks: only blocks of the text are cached."""
    model = toy()
    cache, prefix = made(model)
    truth = PROMPT + greedy_text(model, PROMPT, NEW)
    speculate_with_prefix(model, Scripted(V, truth, [0]), PROMPT, NEW, cache, prefix, 6)
    assert prefix.cached_blocks == (len(PROMPT) + NEW - 1) // 4
    for n in range(1, 5):
        sequence = prefix.begin(truth[: 4 * n + 1])
        assert sequence.cached_tokens == 4 * n
        prefix.end(sequence)


@pytest.mark.parametrize("end", [3, 4, 5, 8, 9])
def test_a_text_that_stops_at_a_block_boundary_is_resumed(end: int) -> None:
    """GeeeekExplorer/nano-vllm#217: blocks of 4, stopped at any length, the same tokens after."""
    model, prompt = toy(seed=5), text(2, seed=6)
    whole = greedy_text(model, prompt, 14)
    cache, prefix = made(model)
    first = speculate_with_prefix(
        model, PromptLookup(V), prompt, end - 2, cache, prefix, 3
    ).tokens
    again = speculate_with_prefix(
        model, PromptLookup(V), prompt + first, 14 - len(first), cache, prefix, 3, resumed=True
    ).tokens
    assert first + again == whole
    assert prefix.stats.prompts == 1


def test_what_was_found_is_asked_when_the_text_begins_and_not_before() -> None:
    """vllm-project/vllm#17305: the plan cannot go stale; computed + found is the prompt."""
    model = toy()
    cache, prefix = made(model, blocks=6)
    generate_with_prefix(model, [*PROMPT, 1, 2, 3, 4], 1, cache, prefix)
    held = prefix.begin(text(22, seed=9))  # evicts everything
    prefix.end(held)
    run = speculate_with_prefix(model, PromptLookup(V), [*PROMPT, 1, 2, 3, 4], 3, cache, prefix)
    assert run.tokens == greedy_text(model, [*PROMPT, 1, 2, 3, 4], 3)


def test_running_out_of_blocks_in_the_middle_holds_nothing_afterwards() -> None:
    model = toy()
    cache, prefix = made(model, blocks=2)
    with pytest.raises(OutOfBlocksError):
        speculate_with_prefix(model, PromptLookup(V), PROMPT, 9, cache, prefix)
    assert (prefix.pool.in_use, cache.lengths) == (0, ())


def test_sampled_text_is_the_same_on_every_cache() -> None:
    model = toy()

    def run(cache: KVCache | None) -> list[int]:
        sampler = Sampler(temperature=1.5, generator=seeded([4]))
        draft = ModelDraft(toy(seed=2), toy(seed=2).new_cache(1, 60))
        return speculate(model, draft, PROMPT, 20, 3, sampler, cache=cache).tokens

    alone = run(None)
    assert run(model.new_cache(1, 25)) == alone
    assert run(model.new_paged_cache(1, BlockPool(20, 3))) == alone
    cache, prefix = made(model)
    sampler = Sampler(temperature=1.5, generator=seeded([4]))
    draft = ModelDraft(toy(seed=2), toy(seed=2).new_cache(1, 60))
    found = speculate_with_prefix(model, draft, PROMPT, 20, cache, prefix, 3, sampler)
    assert found.tokens == alone


WORDS = {"k": "got 0", "prompt": "at least one", "max_new_tokens": "got 0", "stop_tokens": "29",
         "draft": "vocabulary of 30", "cache": "rows without slots of their own"}  # fmt: skip


@pytest.mark.parametrize("changes", [
    {"k": 0}, {"prompt": []}, {"max_new_tokens": 0}, {"stop_tokens": [29]},
    {"draft": PromptLookup(30)}, {"cache": toy().new_cache(1, 20)},
])  # fmt: skip
def test_a_wrong_request_takes_no_block(changes: dict[str, Any]) -> None:
    cache, prefix = made(toy())
    arguments = {"target": toy(), "draft": PromptLookup(V), "prompt": PROMPT, "max_new_tokens": 4,
                 "cache": cache, "prefix": prefix, **changes}  # fmt: skip
    with pytest.raises(ValueError, match=WORDS[next(iter(changes))]):
        speculate_with_prefix(**arguments)
    assert prefix.pool.available == 16
    assert prefix.stats.prompts == 0


def test_a_sequence_that_others_hold_is_left_alone() -> None:
    model = toy()
    cache, prefix = made(model)
    verification = InPrefixCache(model, cache, prefix, prefix.begin)
    verification.read(PROMPT, [])
    verification.keep(0)
    before = list(verification.sequence.blocks)  # type: ignore[union-attr]
    generate_with_prefix(model, text(6, seed=11), 4, cache, prefix)
    drafts = greedy_text(model, [*PROMPT, 7], 2)
    logits = verification.read([7], drafts)
    expected = reference_logits(model, [*PROMPT, 7, *drafts])[-3:]
    assert (logits - expected).abs().max() < 1e-9
    assert verification.sequence.blocks[: len(before)] == before  # type: ignore[union-attr]
    verification.end()
    assert prefix.pool.in_use == 0

