"""Rounds of draft-and-verify: the greedy text, what is fed, where a text ends, what is refused."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import pytest
import torch
from oracles.drafting import Scripted, greedy_text
from oracles.toys import snapshot, text, toy, unchanged

from kvbook.cache import INT8, BlockPool, quantized
from kvbook.errors import CacheFullError
from kvbook.generate import (
    Draft,
    ModelDraft,
    PromptLookup,
    Proposal,
    Sampler,
    first_layers,
    generate_cached,
    speculate,
)
from kvbook.generate.sampling import seeded
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
V = 29
PROMPT = text(5, seed=1)
Make = Callable[[Transformer], Draft]


def model_draft(model: Transformer) -> ModelDraft:
    return ModelDraft(model, model.new_cache(1, 60))


def nearly(model: Transformer, noise: float = 0.1) -> Transformer:
    """A model that often, but not always, agrees with ``model``."""
    other = toy(seed=12345, n_layers=model.config.n_layers, window=model.config.window)
    generator = torch.Generator().manual_seed(9)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        change = torch.randn(theirs.shape, generator=generator, dtype=theirs.dtype)
        mine.copy_(theirs * (1 + noise * change))
    return other


DRAFTS: dict[str, Make] = {
    "a smaller model": lambda model: model_draft(toy(seed=99, n_layers=1)),
    "one that often agrees": lambda model: model_draft(nearly(model)),
    "first layers": lambda model: model_draft(first_layers(model, 1)),
    "prompt lookup": lambda model: PromptLookup(V),
}


# ---- The greedy text is that of plain decoding


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_text_is_the_most_likely_token_at_each_step(name: str, k: int) -> None:
    for seed, changes in enumerate(({}, {"window": 3, "sinks": 2}, {"window": (None, 3)})):
        model = toy(seed=seed, **changes)
        expected = greedy_text(model, PROMPT, 20)
        run = speculate(model, DRAFTS[name](model), PROMPT, 20, k)
        assert run.tokens == expected
        assert len(run.tokens) == 1 + sum(run.accepted) + run.rounds
        assert max(run.proposed) <= k


@pytest.mark.parametrize("k", range(1, 7))
def test_every_number_of_accepted_drafts_gives_the_same_text(k: int) -> None:
    """Each place of the first wrong draft, the first one and none included, twice in a row."""
    model = toy(seed=4)
    expected = greedy_text(model, PROMPT, 30)
    for wrong in range(k + 1):
        draft = Scripted(V, PROMPT + expected, [wrong, wrong, *range(k + 1), 0])
        run = speculate(model, draft, PROMPT, 30, k)
        assert run.tokens == expected
        assert run.accepted[:2] == (wrong, wrong)


def test_batches_of_other_tests_do_not_matter_to_chance() -> None:
    model = toy()
    runs = [
        speculate(model, model_draft(nearly(model)), PROMPT, 20, 3,
                  Sampler(temperature=1.5, generator=seeded([seed])))
        for seed in (5, 6, 5)
    ]  # fmt: skip
    assert runs[0] == runs[2]
    assert runs[0].tokens != runs[1].tokens


# ---- What is fed


def test_a_round_is_one_pass_over_the_last_token_and_the_drafts(fed: list[tuple[int, ...]]) -> None:
    model = toy()
    truth = PROMPT + greedy_text(model, PROMPT, 9)
    run = speculate(model, Scripted(V, truth, [9, 0, 9]), PROMPT, 9, k=3)
    # The prompt; 3 drafts stand; none of 3; the last 3 tokens with 2 drafts.
    assert fed == [(1, 5), (1, 4), (1, 4), (1, 3)]
    assert (run.proposed, run.accepted) == ((3, 3, 2), (3, 0, 2))
    assert (run.rounds, run.tokens_per_round, run.wasted) == (3, 8 / 3, 3)
    assert run.acceptance_by_position == (2 / 3, 2 / 3, 1 / 2)


def test_the_draft_is_fed_what_it_missed(fed: list[tuple[int, ...]]) -> None:
    """After k accepted drafts two tokens: the last draft, which it never read, and the bonus."""
    model = toy()
    speculate(model, model_draft(model), PROMPT, 8, k=2)  # it agrees with itself
    assert fed == [
        (1, 5),  # the target reads the prompt
        (1, 6), (1, 1), (1, 3),  # prompt and first token, one draft, verification
        (1, 2), (1, 1), (1, 3),  # the missing draft and the bonus, ...
        (1, 1),  # one token is left: no drafts
    ]  # fmt: skip


def test_no_draft_is_asked_for_when_one_token_is_left() -> None:
    draft = Scripted(V, [], [0])
    draft.before = lambda: pytest.fail("asked for drafts")
    run = speculate(toy(), draft, PROMPT, 1)
    assert run.tokens == greedy_text(toy(), PROMPT, 1)
    assert (run.proposed, run.accepted, run.rounds, run.wasted) == ((), (), 0, 0)
    assert run.tokens_per_round != run.tokens_per_round  # not a number
    assert run.acceptance_by_position == ()


# ---- Where a text ends


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("wrong", [0, 2, 9])
def test_a_stop_token_ends_the_text_wherever_it_comes(k: int, wrong: int) -> None:
    """As an accepted draft at any place, as a bonus, as a replacement, as the very first token."""
    model, whole = toy(seed=7), greedy_text(toy(seed=7), PROMPT, 14)
    for stop in set(whole):
        expected = whole[: whole.index(stop)]
        cache = model.new_cache(1, 19)
        draft = Scripted(V, PROMPT + whole, [wrong])
        run = speculate(model, draft, PROMPT, 14, k, stop_tokens=[stop], cache=cache)
        assert run.tokens == expected
        assert cache.lengths == (len(PROMPT) + len(expected),)
        assert draft.text == PROMPT + expected
        # The next turn goes on from exactly there.
        turn = [3, 1]
        found = generate_cached(model, [turn], 4, cache=model_like(cache, model))[0]
        assert found == greedy_text(model, [*PROMPT, *expected, *turn], 4)


def model_like(cache: Any, model: Transformer) -> Any:
    """The same tokens' keys and values in a cache with room for more."""
    larger = model.new_cache(1, 60)
    n = cache.lengths[0]
    larger.reserve([n], n)
    for layer in range(len(cache.layer_kinds)):
        keys, values = cache.entries(layer)
        larger.update(layer, keys[None], values[None])
    return larger


@pytest.mark.parametrize("n", range(1, 10))
def test_the_limit_ends_the_text_and_the_cache_holds_all_of_it(n: int) -> None:
    model = toy(seed=2)
    expected = greedy_text(model, PROMPT, n)
    for make in DRAFTS.values():
        cache, draft = model.new_cache(1, len(PROMPT) + n), make(model)
        run = speculate(model, draft, PROMPT, n, 4, cache=cache)
        assert run.tokens == expected
        assert cache.lengths == (len(PROMPT) + n,)
        assert draft.length == len(PROMPT) + n


def before(stop: list[int], tokens: list[int]) -> list[int]:
    return list(takewhile(lambda token: token not in stop, tokens))


@pytest.mark.parametrize("name", DRAFTS)
def test_a_conversation_goes_on_with_the_same_cache_and_draft(name: str) -> None:
    model = toy(seed=3)
    free = greedy_text(model, PROMPT, 8)
    for stop in ([], [free[5]]):
        cache, draft, told = model.new_cache(1, 60), DRAFTS[name](model), []
        for turn in (PROMPT, [7, 1, 2], [4]):
            told += turn
            expected = before(stop, greedy_text(model, told, 8))
            run = speculate(model, draft, turn, 8, 3, stop_tokens=stop, cache=cache)
            assert run.tokens == expected
            told += expected
            assert cache.lengths == (len(told),) == (draft.length,)


# ---- Refused by name, before anything has changed


def bad(**changes: Any) -> dict[str, Any]:
    model = toy()
    return {"target": model, "draft": PromptLookup(V), "prompt": PROMPT, "max_new_tokens": 4,
            "k": 2, "cache": model.new_cache(1, 30), **changes}  # fmt: skip


def told(draft: Any, tokens: list[int]) -> Any:
    draft.extend(tokens)
    return draft


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": 0}, "k, the most drafts in a round, .* got 0; generate_cached"),
        ({"k": -1}, "got -1"),
        ({"k": True}, "got True"),
        ({"k": 2.0}, "got 2.0"),
        ({"prompt": []}, "at least one token"),
        ({"prompt": [29]}, "from 0 to 28, got 29"),
        ({"prompt": [True]}, "integer token ids"),
        ({"prompt": [[1]]}, "integer token ids"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a positive integer, got 0"),
        ({"stop_tokens": [29]}, r"from 0 to 28, got \[29\]"),
        ({"stop_tokens": 5}, "got 5"),
        ({"target": None}, "model must be a Transformer"),
        ({"draft": None}, "draft must be a Draft"),
        ({"draft": PromptLookup(30)}, "vocabulary of 30 tokens, the target one of 29"),
        ({"draft": told(PromptLookup(V), [1, 2])}, r"text of 2 tokens, but the cache holds 0"),
        ({"draft": model_draft(toy(vocab_size=28))}, "vocabulary of 28"),
        ({"sampler": lambda logits: logits.argmax(-1)}, "sampler must be a Sampler"),
        ({"sampler": Sampler(temperature=1.0, generator=seeded([1, 2]))}, "one generator, got 2"),
        ({"cache": toy(n_layers=3).new_cache(1, 30)}, "belongs to another model"),
        ({"cache": toy().new_cache(2, 30)}, "2 active rows"),
        ({"cache": 5}, "cache must be a KVCache"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused(changes: dict[str, Any], words: str) -> None:
    arguments = bad(**changes)
    cache, draft = arguments["cache"], arguments["draft"]
    before = snapshot(cache) if cache != 5 else None
    length = getattr(draft, "length", None)
    with pytest.raises(ValueError, match=words):
        speculate(**arguments)
    assert before is None or unchanged(cache, before)
    assert getattr(draft, "length", None) == length


@pytest.mark.parametrize("room", [1, 5, 8])
def test_a_cache_that_is_too_short_is_refused_at_once(room: int) -> None:
    """A prompt of 5 and 4 new tokens need 9 slots."""
    model = toy()
    for cache in (model.new_cache(1, room), model.new_paged_cache(1, BlockPool(room, 1))):
        with pytest.raises(CacheFullError):
            speculate(model, PromptLookup(V), PROMPT, 4, cache=cache)
        assert cache.lengths == (0,)
    assert speculate(model, PromptLookup(V), PROMPT, 4, cache=model.new_cache(1, 9)).tokens


def test_a_draft_that_is_too_short_is_refused_at_once() -> None:
    """Of 5 + 4 tokens it reads at most 7: the last comes without drafts, the one before is one."""
    model = toy()
    for capacity, longest in ((6, 64), (20, 6)):
        small = toy(n_layers=1, max_positions=longest)
        draft, cache = ModelDraft(small, small.new_cache(1, capacity)), model.new_cache(1, 9)
        with pytest.raises(CacheFullError):
            speculate(model, draft, PROMPT, 4, cache=cache)
        assert (cache.lengths, draft.length, draft.cache.lengths) == ((0,), 0, (0,))
    for capacity, longest in ((7, 64), (20, 7)):
        small = toy(n_layers=1, max_positions=longest)
        draft = ModelDraft(small, small.new_cache(1, capacity))
        assert speculate(model, draft, PROMPT, 4).tokens == greedy_text(model, PROMPT, 4)


def test_the_models_positions_are_a_limit() -> None:
    model = toy(max_positions=8)
    assert speculate(model, PromptLookup(V), PROMPT, 4).tokens == greedy_text(model, PROMPT, 4)
    with pytest.raises(CacheFullError, match="the model has 8"):
        speculate(model, PromptLookup(V), PROMPT, 5)
    with pytest.raises(CacheFullError, match="8 positions"):
        speculate(model, PromptLookup(V), PROMPT, 4, cache=model.new_cache(1, 30))


def test_a_cache_that_another_uses_between_two_steps_is_noticed() -> None:
    model = toy()
    cache = model.new_cache(1, 30)
    with pytest.raises(ValueError, match="somebody else wrote to it between two steps"):
        speculate(model, ModelDraft(model, cache), PROMPT, 6, cache=cache)


class TooMany(PromptLookup):
    def propose(self, k: int, sampler: Sampler) -> Proposal:
        return Proposal([1] * (k + 1), torch.ones(k + 1, V) / V)


class NoDistribution(PromptLookup):
    def propose(self, k: int, sampler: Sampler) -> Proposal:
        return Proposal([1], torch.zeros(1, V))


@pytest.mark.parametrize(
    ("draft", "words"),
    [(TooMany(V), "asked for up to 2 drafts and proposed 3"), (NoDistribution(V), "sums to 0")],
)
def test_a_draft_that_breaks_its_word_is_named(draft: Draft, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        speculate(toy(), draft, PROMPT, 6, 2)


@pytest.mark.parametrize("name", DRAFTS)
def test_after_a_failure_cache_and_draft_hold_what_they_held_before(name: str) -> None:
    """The second turn fails in its second round; tried again, it is as if it had not."""
    model = toy(seed=3)
    cache, draft = model.new_cache(1, 60), DRAFTS[name](model)
    first = speculate(model, draft, PROMPT, 6, 2, cache=cache).tokens
    held = [tensor.clone() for tensor in cache.entries(1)]
    calls = []

    class Fails(Sampler):
        def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
            calls.append(len(logits))
            if len(calls) == 4:
                raise RuntimeError("out of luck")
            return super().probabilities(logits)

    with pytest.raises(RuntimeError, match="out of luck"):
        speculate(model, draft, [7, 1], 8, 2, Fails(), cache=cache)
    assert len(calls) == 4
    assert (cache.lengths, draft.length) == ((11,), 11)
    assert all(a.equal(b) for a, b in zip(held, cache.entries(1), strict=True))
    expected = greedy_text(model, [*PROMPT, *first, 7, 1], 8)
    assert speculate(model, draft, [7, 1], 8, 2, cache=cache).tokens == expected


def test_a_long_quantized_run_is_the_plain_one() -> None:
    model = toy()
    make = lambda: model.new_cache(1, 60, store=quantized(INT8.grouped(3)))  # noqa: E731
    plain = generate_cached(model, [PROMPT], 40, cache=make())[0]
    assert speculate(model, model_draft(model), PROMPT, 40, 4, cache=make()).tokens == plain
