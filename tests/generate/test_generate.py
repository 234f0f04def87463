"""The two loops: what they feed, what they return, and that both return the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracles.toys import reference_logits, text, toy

from kvbook.cache import INT8, BlockPool, KVCache, quantized
from kvbook.errors import CacheFullError
from kvbook.generate import (
    Sampler,
    generate_cached,
    generate_naive,
    left_pad,
    stream_cached,
    stream_naive,
)
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [text(4, seed=1), text(1, seed=2), text(7, seed=3)]


def greedy_by_hand(model: Transformer, prompt: list[int], n: int) -> list[int]:
    """The most likely token, n times, by the formulas of ``toys`` alone."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def sampler(seed: int) -> Sampler:
    generator = torch.Generator().manual_seed(seed)
    return Sampler(temperature=1.5, top_k=20, top_p=0.95, generator=generator)


# ---- The same text


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_is_the_most_likely_token_at_each_step(
    window: int | None, seed: int
) -> None:
    model = toy(seed=seed, window=window)
    expected = [greedy_by_hand(model, prompt, 9) for prompt in PROMPTS]
    assert len({token for one in expected for token in one}) > 3, "a text worth comparing"
    assert generate_cached(model, PROMPTS, 9) == expected
    assert generate_naive(model, PROMPTS, 9) == expected


@pytest.mark.parametrize("seed", range(5))
def test_sampled_text_is_the_same_with_and_without_a_cache(seed: int) -> None:
    model = toy()
    cached = generate_cached(model, PROMPTS, 12, sampler(seed))
    assert cached == generate_naive(model, PROMPTS, 12, sampler(seed))
    assert cached != generate_cached(model, PROMPTS, 12, sampler(seed + 100))


def test_a_batch_of_ragged_prompts_is_its_solo_runs() -> None:
    model = toy()
    alone = [generate_cached(model, [prompt], 9)[0] for prompt in PROMPTS]
    assert generate_cached(model, PROMPTS, 9) == alone
    assert generate_naive(model, PROMPTS, 9) == alone


def test_a_batch_in_another_order_is_the_same_texts() -> None:
    model = toy()
    assert generate_cached(model, PROMPTS[::-1], 6) == generate_cached(model, PROMPTS, 6)[::-1]


# ---- What is fed


def test_the_cached_loop_feeds_the_prompt_and_then_one_token_a_step(
    fed: list[tuple[int, ...]],
) -> None:
    generate_cached(toy(), [text(5)], 4)
    assert fed == [(1, 5), (1, 1), (1, 1), (1, 1)]


def test_the_naive_loop_feeds_everything_again(fed: list[tuple[int, ...]]) -> None:
    generate_naive(toy(), [text(5)], 4)
    assert fed == [(1, 5), (1, 6), (1, 7), (1, 8)]


def test_a_stream_never_feeds_its_last_token() -> None:
    """So a prompt of 5 and 4 new tokens need 8 slots."""
    model, prompt = toy(), text(5)
    cache = model.new_cache(1, 8)
    assert len(list(stream_cached(model, [prompt], 4, cache=cache))) == 4
    assert cache.lengths == (8,)


# ---- What the cache holds afterwards: prompt and returned tokens


def test_a_given_cache_holds_prompt_and_returned_tokens_and_no_more() -> None:
    """microsoft/onnxruntime-genai#1814, ml-explore/mlx-lm#602: one row stops, the others go on."""
    model = toy()
    free = [greedy_by_hand(model, prompt, 9) for prompt in PROMPTS]
    for stops in ([], [free[0][1]], [free[1][0]], [free[2][8]]):
        for new_cache in (
            lambda: model.new_cache(3, 40),
            lambda: model.new_cache(3, 40, store=quantized(INT8.grouped(3)), tail=60),
            lambda: model.new_paged_cache(3, BlockPool(60, 2)),
        ):
            cache = new_cache()
            texts = generate_cached(model, PROMPTS, 9, stop_tokens=stops, cache=cache)
            told = [[*prompt, *new] for prompt, new in zip(PROMPTS, texts, strict=True)]
            assert cache.lengths == tuple(map(len, told))
            # The next turn is what it would be after reading everything anew, in every row.
            turn = [[7, 1], [3], [4, 4, 2]]
            found = generate_cached(model, turn, 5, cache=cache)
            for row, one in enumerate(told):
                assert found[row] == greedy_by_hand(model, [*one, *turn[row]], 5)


def test_a_row_that_stopped_writes_nothing_more(fed: list[tuple[int, ...]]) -> None:
    model = toy()
    stop = greedy_by_hand(model, PROMPTS[0], 1)[0]
    cache = model.new_cache(3, 40)
    del fed[:]
    steps = [step.tolist() for step in
             stream_cached(model, PROMPTS, 3, cache=cache, stop_tokens=[stop])]
    others = [greedy_by_hand(model, prompt, 3) for prompt in PROMPTS[1:]]
    assert [[step[row] for step in steps] for row in (1, 2)] == others
    assert stop not in [token for one in others for token in one[:2]]  # they go on to the end
    assert cache.lengths == (len(PROMPTS[0]), len(PROMPTS[1]) + 2, len(PROMPTS[2]) + 2)
    assert fed == [(3, 7), (3, 1), (3, 1)]


@pytest.mark.parametrize("stops", [5, "5", [True], [29], [-1], [2.0], None, [[1]]], ids=str)
def test_stop_tokens_are_looked_at_before_anything_is_read(stops: Any) -> None:
    model, cache = toy(), toy().new_cache(1, 20)
    for generate in (generate_cached, generate_naive):
        with pytest.raises(ValueError, match="stop_tokens must be a list or set of token ids"):
            generate(model, [text(3)], 4, stop_tokens=stops)
    with pytest.raises(ValueError, match="stop_tokens"):
        generate_cached(model, [text(3)], 4, stop_tokens=stops, cache=cache)
    assert cache.lengths == (0,)


def test_one_new_token_needs_no_decode_step(fed: list[tuple[int, ...]]) -> None:
    assert len(generate_cached(toy(), [text(5)], 1)[0]) == 1
    assert fed == [(1, 5)]


# ---- Step by step


@pytest.mark.parametrize("stream", [stream_cached, stream_naive])
def test_a_stream_yields_one_token_per_row_and_works_only_when_asked(
    stream: object, fed: list[tuple[int, ...]]
) -> None:
    model = toy()
    steps: Iterator[torch.Tensor] = stream(model, PROMPTS, 6)  # type: ignore[operator]
    assert fed == []
    first = next(steps)
    assert len(fed) == 1
    assert first.shape == (3,)
    assert first.dtype == torch.int64
    rest = list(steps)
    assert len(rest) == 5
    columns = torch.stack([first, *rest], 1).tolist()
    assert columns == [greedy_by_hand(model, prompt, 6) for prompt in PROMPTS]


def test_a_stream_that_is_left_leaves_a_cache_to_go_on_with() -> None:
    model, prompt = toy(), text(5)
    expected = greedy_by_hand(model, prompt, 6)
    cache = model.new_cache(1, 20)
    steps = stream_cached(model, [prompt], 6, cache=cache)
    taken = [next(steps).item() for _ in range(3)]
    assert cache.lengths == (7,)  # the prompt and two tokens: the third was not fed back
    assert taken == expected[:3]
    assert generate_cached(model, [[taken[-1]]], 3, cache=cache) == [expected[3:]]


def test_a_cache_that_holds_text_is_continued() -> None:
    model, prompt = toy(), text(8)
    cache = model.new_cache(1, 20)
    model(torch.tensor([prompt[:5]]), cache)
    expected = greedy_by_hand(model, prompt, 6)
    assert generate_cached(model, [prompt[5:]], 6, cache=cache) == [expected]


def test_rows_that_hold_different_lengths_are_continued() -> None:
    model, texts = toy(), [text(8, seed=1), text(8, seed=2)]
    cache = model.new_cache(2, 20)
    model(torch.tensor([texts[0][:5], texts[1][:5]]), cache, counts=[2, 5])
    held = [texts[0][3:5], texts[1][:5]]
    asked = [texts[0][5:8], texts[1][5:6]]
    expected = [greedy_by_hand(model, a + b, 5) for a, b in zip(held, asked, strict=True)]
    assert generate_cached(model, asked, 5, cache=cache) == expected


# ---- Stop tokens


@pytest.mark.parametrize("loop", [generate_cached, generate_naive])
def test_a_row_ends_before_its_first_stop_token(
    loop: object, fed: list[tuple[int, ...]]
) -> None:
    model = toy()
    free = [greedy_by_hand(model, prompt, 9) for prompt in PROMPTS]
    stop = free[0][3]
    expected = [one[: one.index(stop)] if stop in one else one for one in free]
    assert len({len(one) for one in expected}) > 1, "rows should end at different steps"
    assert loop(model, PROMPTS, 9, stop_tokens=[stop]) == expected  # type: ignore[operator]


@pytest.mark.parametrize("loop", [generate_cached, generate_naive])
def test_the_loop_ends_when_every_row_has(loop: object, fed: list[tuple[int, ...]]) -> None:
    model, prompt = toy(), text(4, seed=1)
    free = greedy_by_hand(model, prompt, 9)
    first = free.index(free[2])
    new = loop(model, [prompt], 9, stop_tokens={free[2]})  # type: ignore[operator]
    assert new == [free[:first]]
    assert len(fed) == first + 1


def test_a_first_token_that_stops_leaves_an_empty_text() -> None:
    model, prompt = toy(), text(4, seed=1)
    (first,) = greedy_by_hand(model, prompt, 1)
    assert generate_cached(model, [prompt], 9, stop_tokens=[first]) == [[]]


def test_several_stop_tokens_each_stop() -> None:
    model = toy()
    free = [greedy_by_hand(model, prompt, 9) for prompt in PROMPTS]
    stops = {free[0][4], free[2][2]}
    ends = [next((i for i, t in enumerate(one) if t in stops), 9) for one in free]
    expected = [one[:end] for one, end in zip(free, ends, strict=True)]
    assert generate_cached(model, PROMPTS, 9, stop_tokens=stops) == expected


# ---- Padding and room


def test_prompts_are_padded_on_the_left() -> None:
    tokens, counts = left_pad([[7, 8, 9], [5], [1, 2]])
    assert tokens.tolist() == [[7, 8, 9], [0, 0, 5], [0, 1, 2]]
    assert tokens.dtype == torch.int64
    assert counts == [3, 1, 2]


def test_generation_may_fill_the_cache_and_the_positions_to_the_last() -> None:
    model, prompt = toy(max_positions=12), text(5)
    assert len(generate_cached(model, [prompt], 8)[0]) == 8
    assert len(generate_cached(model, [prompt], 7, cache=model.new_cache(1, 12))[0]) == 7
    with pytest.raises(CacheFullError, match="row 0 would hold 13 tokens, but the cache has 12"):
        generate_cached(model, [prompt], 8, cache=model.new_cache(1, 12))
    with pytest.raises(CacheFullError, match=r"need 13 positions, but the model has 12"):
        generate_cached(model, [prompt], 9)
    with pytest.raises(CacheFullError, match=r"need 13 positions, but the model has 12"):
        generate_naive(model, [prompt], 9)


# ---- A sampler that gives nonsense


def scripted(*results: Any) -> Any:
    """A sampler that gives these, one after the other; an exception is raised."""
    left = list(results)

    def sample(logits: torch.Tensor) -> Any:
        result = left.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    return sample


NONSENSE = [
    None,
    [3],
    torch.tensor(3),
    torch.tensor([3, 4]),
    torch.tensor([[3]]),
    torch.tensor([3.0]),
    torch.tensor([3], dtype=torch.int32),
    torch.tensor([-1]),
    torch.tensor([29]),  # as many as there are tokens
]
CACHES: dict[str, Callable[[Transformer], KVCache]] = {
    "contiguous": lambda model: model.new_cache(1, 40),
    "ring": lambda model: model.new_cache(1, 40, rollback=12),
    "quantized": lambda model: model.new_cache(1, 40, store=quantized(INT8.grouped(6))),
    "tail": lambda model: model.new_cache(1, 40, store=quantized(INT8.grouped(6)), tail=20),
    "paged": lambda model: model.new_paged_cache(1, BlockPool(16, 4)),
}


@pytest.mark.parametrize("nonsense", NONSENSE, ids=repr)
@pytest.mark.parametrize("step", [0, 2])
def test_what_is_no_token_is_refused_and_the_cache_holds_what_it_held(
    nonsense: object, step: int
) -> None:
    model, good = toy(), torch.tensor([3])
    cache = model.new_cache(1, 40)
    generate_cached(model, [text(5, seed=4)], 3, cache=cache)
    held = [entry.clone() for entry in cache.entries(1)]
    message = r"the sampler gave .* for 1 rows.*from 0 to 28"
    with pytest.raises(ValueError, match=message):
        generate_cached(model, [[1, 2]], 3, scripted(*[good] * step, nonsense), cache=cache)
    with pytest.raises(ValueError, match=message):
        generate_naive(model, [[1, 2]], 3, scripted(*[good] * step, nonsense))
    assert cache.lengths == (8,)
    assert all(map(torch.equal, cache.entries(1), held))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("error", [KeyError("own"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_sampler_that_fails_leaves_every_kind_of_cache_as_it_was(
    kind: str, error: BaseException, step: int
) -> None:
    model = toy(window=6)
    cache, twin = (CACHES[kind](model) for _ in range(2))
    for each in (cache, twin):
        generate_cached(model, [text(5, seed=4)], 2, cache=each)
    with pytest.raises(type(error)):
        generate_cached(model, [[1, 2, 3]], 4, scripted(*[torch.tensor([3])] * step, error),
                        cache=cache)  # fmt: skip
    assert cache.lengths == twin.lengths
    again = [generate_cached(model, [[7, 8]], 6, cache=each) for each in (cache, twin)]
    assert again[0] == again[1]
    assert cache.lengths == twin.lengths


def test_a_stream_that_fails_holds_what_it_has_yielded_but_for_the_last() -> None:
    model = toy()
    good = [torch.tensor([token]) for token in (3, 4, 5)]
    for step in range(4):
        cache = model.new_cache(1, 40)
        stream = stream_cached(model, [[1, 2]], 9, scripted(*good[:step], None), cache)
        drawn = [next(stream) for _ in range(step)]
        assert len(drawn) == step
        with pytest.raises(ValueError, match="the sampler gave None"):
            next(stream)
        assert cache.lengths == ((2 + step - 1) if step else 0,)


def test_what_a_window_has_let_go_is_told() -> None:
    """A ring of 4 has read 12 tokens more: the first five cannot come back."""
    model = toy(window=4)
    cache = model.new_cache(1, 40, rollback=1)
    generate_cached(model, [text(5, seed=4)], 1, cache=cache)
    with pytest.raises(ValueError, match="the sampler gave None") as caught:
        generate_cached(model, [text(12)], 3, scripted(None), cache=cache)
    [first, *_] = caught.value.__notes__
    assert "could not be taken back to [6] tokens" in first
    assert "reset() empties it" in first
    cache.reset()
    assert generate_cached(model, [[1, 2]], 3, cache=cache) == generate_cached(model, [[1, 2]], 3)


def test_closing_a_stream_is_no_failure() -> None:
    model = toy()
    cache = model.new_cache(1, 40)
    stream = stream_cached(model, [[1, 2]], 9, cache=cache)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert cache.lengths == (2,)
