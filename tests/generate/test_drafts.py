"""Three makers of drafts: what each proposes, what it has read, what it forgets."""

from typing import Any

import pytest
import torch
from oracles.drafting import greedy_text
from oracles.toys import LATENT, reference_logits, snapshot, text, toy, unchanged

from kvbook.generate import (
    Draft,
    ModelDraft,
    PromptLookup,
    Sampler,
    first_layers,
    greedy,
    one_hot,
    speculate,
)
from kvbook.generate.sampling import seeded
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
V = 29
PROMPT = text(5, seed=1)


def draft_of(model: Transformer, capacity: int = 40) -> ModelDraft:
    return ModelDraft(model, model.new_cache(1, capacity))


def test_all_of_them_answer_what_is_asked_of_a_draft() -> None:
    for draft in (draft_of(toy()), draft_of(first_layers(toy(), 1)), PromptLookup(V)):
        assert isinstance(draft, Draft)
        assert (draft.vocab_size, draft.length) == (V, 0)


# ---- A smaller model


def test_a_model_proposes_what_it_would_write() -> None:
    draft = draft_of(toy())
    draft.extend(PROMPT)
    found = draft.propose(4, greedy)
    assert found.tokens == greedy_text(toy(), PROMPT, 4)
    assert found.probabilities.equal(one_hot(found.tokens, V))
    assert draft.cache.lengths == (8,)  # the last draft is not read


def test_sampled_drafts_come_with_the_rows_that_they_were_drawn_from() -> None:
    draft, sampler = draft_of(toy()), Sampler(1.3, top_k=9, top_p=0.9, generator=seeded([3]))
    draft.extend(PROMPT)
    tokens, rows = draft.propose(5, sampler)
    for place in range(5):
        logits = reference_logits(toy(), [*PROMPT, *tokens[:place]])[-1:]
        assert (rows[place] - sampler.probabilities(logits)[0]).abs().max() < 1e-6
        assert rows[place, tokens[place]] > 0
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("stood", range(5))
def test_what_stood_stays_and_the_rest_is_read_anew(stood: int) -> None:
    """After 4 drafts, ``stood`` of them and another token; 3 of the drafts were read."""
    draft = draft_of(toy())
    draft.extend(PROMPT)
    tokens = draft.propose(4, greedy).tokens
    new = [*tokens[:stood], (tokens[stood] + 1) % V if stood < 4 else 7]
    draft.extend(new)
    assert draft.cache.lengths == (5 + min(stood, 3),)
    assert draft.propose(3, greedy).tokens == greedy_text(toy(), PROMPT + new, 3)


def test_a_text_that_ends_within_its_drafts_goes_on_from_there() -> None:
    draft = draft_of(toy())
    draft.extend(PROMPT)
    tokens = draft.propose(4, greedy).tokens
    draft.extend(tokens[:2])
    draft.extend([])
    draft.extend([3, 1])
    told = [*PROMPT, *tokens[:2], 3, 1]
    assert draft.propose(2, greedy).tokens == greedy_text(toy(), told, 2)


def test_drafts_that_nobody_answered_are_forgotten() -> None:
    draft = draft_of(toy())
    draft.extend(PROMPT)
    first = draft.propose(4, greedy).tokens
    assert draft.propose(4, greedy).tokens == first
    draft.reset()
    assert (draft.length, draft.cache.lengths) == (0, (0,))
    draft.extend([8, 9])
    assert draft.propose(2, greedy).tokens == greedy_text(toy(), [8, 9], 2)


@pytest.mark.parametrize("rollback", [None, 4])
@pytest.mark.parametrize("length", [0, 1, 5, 7, 12])
def test_a_draft_can_be_told_that_a_text_did_not_go_on(length: int, rollback: int | None) -> None:
    """Where its ring has let go of what it needs, it reads the text anew."""
    model = toy(window=3)
    draft = ModelDraft(model, model.new_cache(1, 40, rollback=rollback))
    told = [*PROMPT, *text(7, seed=2)]
    draft.extend(told)
    draft.propose(4, greedy)
    draft.truncate(length)
    assert draft.length == length
    draft.extend([8])
    assert draft.propose(3, greedy).tokens == greedy_text(model, [*told[:length], 8], 3)
    lookup = PromptLookup(V)
    lookup.extend(told)
    lookup.truncate(length)
    assert lookup.text == told[:length]


def test_a_draft_continues_a_text() -> None:
    with pytest.raises(ValueError, match=r"extend\(\) it with the prompt first"):
        draft_of(toy()).propose(2, greedy)


@pytest.mark.parametrize(
    ("model", "cache", "words"),
    [
        (None, None, "model must be a Transformer"),
        (toy(), 5, "cache must be a KVCache"),
        (toy(), toy().new_cache(2, 9), r"one row of its own model, got .* hold \[0, 0\]"),
        (toy(), toy(n_layers=1).new_cache(1, 9), "got one of 1 layers"),
    ],
)
def test_a_draft_has_an_empty_cache_of_its_own_model(model: Any, cache: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelDraft(model, cache)
    used = toy().new_cache(1, 9)
    toy()(torch.tensor([[1, 2]]), used)
    with pytest.raises(ValueError, match=r"hold \[2\]"):
        ModelDraft(toy(), used)


# ---- First layers


@pytest.mark.parametrize("changes", [
    {}, {"window": (3, None, 8)}, {"window": 3, "sinks": 2}, {"window": (None, 3, 3), "sinks": 1},
    LATENT, {"tied_embeddings": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_first_layers_are_the_model_cut_off(layers: int, changes: dict[str, Any]) -> None:
    model = toy(**{"n_layers": 3, **changes})
    kept = dict(model.named_parameters())
    early = first_layers(model, layers)
    # A model of that many layers with the same numbers in it.
    window = changes.get("window")
    window = window[:layers] if isinstance(window, tuple) else window
    sinks = changes.get("sinks", 0) if window != (None,) else 0
    other = toy(seed=77, **{**changes, "n_layers": layers, "window": window, "sinks": sinks})
    other.load_state_dict({name: kept[name] for name, _ in other.named_parameters()})
    expected = reference_logits(other, PROMPT)
    tokens = torch.tensor([PROMPT])
    assert (early(tokens)[0] - expected).abs().max() < 1e-9
    assert (early(tokens, early.new_cache(1, 9))[0] - expected).abs().max() < 1e-9
    # Nothing is copied, and the model is what it was.
    assert {p.data_ptr() for p in early.parameters()} <= {p.data_ptr() for p in kept.values()}
    assert dict(model.named_parameters()).keys() == kept.keys()
    assert (model.config.n_layers, len(model.blocks)) == (3, 3)
    assert (model(tokens)[0] - reference_logits(model, PROMPT)).abs().max() < 1e-9


def test_first_layers_take_a_cache_of_their_own_only() -> None:
    model = toy()
    with pytest.raises(ValueError, match="layers 2 instead of 1"):
        first_layers(model, 1)(torch.tensor([PROMPT]), model.new_cache(1, 9))
    with pytest.raises(ValueError, match="layers 1 instead of 2"):
        model(torch.tensor([PROMPT]), first_layers(model, 1).new_cache(1, 9))


@pytest.mark.parametrize("layers", [0, 3, -1, True, 1.0, None])
def test_there_are_as_many_first_layers_as_the_model_has(layers: Any) -> None:
    with pytest.raises(ValueError, match=f"from 1 to 2, those of the model, got {layers!r}"):
        first_layers(toy(), layers)


def test_all_layers_are_always_right() -> None:
    run = speculate(toy(), draft_of(first_layers(toy(), 2)), PROMPT, 13, 3)
    assert run.wasted == 0
    assert run.acceptance_by_position == (1.0, 1.0, 1.0)
    assert run.rounds == 3


# ---- Prompt lookup


@pytest.mark.parametrize(
    ("told", "k", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),  # three tokens match
        ([1, 2, 3, 4, 5, 1, 2, 3], 9, [4, 5, 1, 2, 3, 4, 5, 1, 2]),  # the copy goes on
        ([7, 2, 9, 8, 2], 2, [9, 8]),  # one token
        ([1, 2, 5, 3, 2, 6, 4, 1, 2], 1, [5]),  # two tokens at once before one token later
        ([1, 2, 5, 3, 1, 2, 6, 4, 1, 2], 1, [6]),  # of equals the latest
        ([4, 4, 4], 3, [4, 4, 4]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)  # fmt: skip
def test_lookup_copies_what_followed_the_last_tokens(
    told: list[int], k: int, expected: list[int]
) -> None:
    draft = PromptLookup(V)
    draft.extend(told[:2])
    draft.extend(told[2:])
    found = draft.propose(k, greedy)
    assert found.tokens == expected
    assert found.probabilities.equal(one_hot(expected, V))
    assert draft.length == len(told)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [((1, 1), [6]), ((2, 2), [5]), ((3, 3), []), ((3, 2), [5]), ((3, 1), [5])],
)
def test_how_long_a_match_may_be_can_be_set(settings: tuple[int, int], expected: list[int]) -> None:
    draft = PromptLookup(V, *settings)
    draft.extend([1, 2, 5, 3, 2, 6, 4, 1, 2])
    assert draft.propose(1, greedy).tokens == expected
    draft.reset()
    assert (draft.length, draft.propose(1, greedy).tokens) == (0, [])


@pytest.mark.parametrize(
    ("settings", "words"),
    [((0,), "got 0"), ((V, 0), "max_ngram .* got 0"), ((V, 3, 0), "min_ngram .* got 0"),
     ((V, 2, 3), "min_ngram must be at most max_ngram, got 3 and 2"), ((V, True), "got True")],
)  # fmt: skip
def test_lookups_settings_are_checked(settings: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PromptLookup(*settings)


def test_a_draft_leaves_the_target_alone() -> None:
    model = toy()
    cache = model.new_cache(1, 30)
    model(torch.tensor([PROMPT]), cache)
    before = snapshot(cache)
    draft = draft_of(first_layers(model, 1))
    draft.extend(PROMPT)
    draft.propose(4, greedy)
    assert unchanged(cache, before)
