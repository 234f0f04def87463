"""From logits to a token: exact distributions on small logits, then the draws."""

import re
from collections import Counter
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from oracles.toys import text, toy

from kvbook.generate import generate_cached
from kvbook.generate.sampling import Sampler, check_device, greedy, seeded

pytestmark = pytest.mark.usefixtures("one_thread")
MINUS_INFINITY = float("-inf")

# Probabilities 0.1, 0.4, 0.2, 0.3: neither sorted nor alike.
LOGITS = [log(0.1), log(0.4), log(0.2), log(0.3)]


def distribution(logits: list[float], **settings: float) -> list[float]:
    sampler = Sampler(**{"temperature": 1.0, **settings})  # type: ignore[arg-type]
    return sampler.probabilities(torch.tensor([logits]))[0].tolist()


def about(values: list[float]) -> object:
    return pytest.approx(values, abs=1e-6)


def test_without_limits_it_is_the_softmax() -> None:
    assert distribution(LOGITS) == about([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [0, 1, 0, 0]),
        (2, [0, 4 / 7, 0, 3 / 7]),
        (3, [0, 4 / 9, 2 / 9, 3 / 9]),
        (4, [0.1, 0.4, 0.2, 0.3]),
        (99, [0.1, 0.4, 0.2, 0.3]),
        (10**400, [0.1, 0.4, 0.2, 0.3]),
    ],
)
def test_top_k_keeps_the_k_most_likely(k: int, expected: list[float]) -> None:
    assert distribution(LOGITS, top_k=k) == about(expected)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (1e-9, [0, 1, 0, 0]),
        (0.39, [0, 1, 0, 0]),
        (0.41, [0, 4 / 7, 0, 3 / 7]),
        (0.69, [0, 4 / 7, 0, 3 / 7]),
        (0.71, [0, 4 / 9, 2 / 9, 3 / 9]),
        (0.91, [0.1, 0.4, 0.2, 0.3]),
        (1.0, [0.1, 0.4, 0.2, 0.3]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_p(p: float, expected: list[float]) -> None:
    assert distribution(LOGITS, top_p=p) == about(expected)


@pytest.mark.parametrize(("p", "kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_reaching_p_exactly_is_enough(p: float, kept: int) -> None:
    """Four equal logits are 0.25 each, without rounding. Ties are kept in order of token id."""
    assert distribution([0.0] * 4, top_p=p) == about([1 / kept] * kept + [0.0] * (4 - kept))


@pytest.mark.parametrize(("p", "kept"), [(0.8, 8), (0.3, 3), (0.7, 7), (0.9, 9), (0.81, 9)])
def test_a_sum_that_misses_p_by_rounding_has_reached_it(p: float, kept: int) -> None:
    """mlx-lm#1912: eight times 0.1 is 0.7999999999999999, and a ninth token was kept."""
    assert distribution([0.0] * 10, top_p=p) == about([1 / kept] * kept + [0.0] * (10 - kept))


def test_the_smallest_p_keeps_the_first_of_the_most_likely() -> None:
    assert distribution([0.0] * 10, top_p=1e-300) == [1.0] + [0.0] * 9
    assert distribution([0.0, 40.0, 40.0], top_p=1e-300) == [0.0, 1.0, 0.0]


def test_p_a_little_below_one_still_drops_what_is_behind_it() -> None:
    """Tokens of 0.9, 0.09 and 0.01."""
    logits = [log(0.9), log(0.09), log(0.01)]
    assert distribution(logits, top_p=0.995) == about([0.9, 0.09, 0.01])
    assert distribution(logits, top_p=0.989999) == about([10 / 11, 1 / 11, 0])


def test_at_temperature_zero_the_token_that_is_taken_is_certain() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]], dtype=torch.bfloat16)
    certain = greedy.probabilities(logits)
    assert certain.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert certain.dtype == torch.float32
    assert Sampler(temperature=0.0, top_k=3, top_p=0.5).probabilities(logits).equal(certain)


def test_top_k_comes_before_top_p() -> None:
    """Of 4/7 and 3/7 the first alone reaches 0.5. Before top-k it has 0.4 and would not."""
    assert distribution(LOGITS, top_k=2, top_p=0.5) == about([0, 1, 0, 0])


def test_temperature_divides_the_logits() -> None:
    assert distribution([0.0, 2 * log(3)], temperature=2.0) == about([0.25, 0.75])
    assert distribution([0.0, log(3)], temperature=0.5) == about([0.1, 0.9])


def test_temperature_comes_before_top_p() -> None:
    """At temperature 2 the probabilities are 1/4 and 3/4, not 1/10 and 9/10."""
    assert distribution([0.0, 2 * log(3)], temperature=2.0, top_p=0.8) == about([0.25, 0.75])
    assert distribution([0.0, 2 * log(3)], temperature=1.0, top_p=0.8) == about([0, 1])


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-300, 5e-324])
def test_towards_temperature_zero_the_most_likely_token_is_certain(temperature: float) -> None:
    assert distribution([1.0, 2.5, 2.0, -7.0], temperature=temperature) == [0, 1, 0, 0]
    assert distribution([2.5, 1.0, 2.5], temperature=temperature) == [0.5, 0, 0.5]


def test_a_token_that_is_ruled_out_is_never_kept() -> None:
    assert distribution([0.0, MINUS_INFINITY, 0.0]) == about([0.5, 0, 0.5])
    assert distribution([0.0, MINUS_INFINITY], top_k=2) == about([1, 0])


def test_top_p_of_one_keeps_a_whole_vocabulary() -> None:
    """A running sum reaches 1 long before the last token: of 49,152 float32 probabilities after
    about half of them, and in float64 after the first of two that are e^40 apart."""
    logits = 3 * torch.randn(1, 49_152)
    kept = Sampler(temperature=1.0).probabilities(logits)
    assert (kept > 0).all()
    assert kept.sum().item() == pytest.approx(1.0, abs=1e-4)
    assert distribution([40.0, 0.0])[1] == pytest.approx(4.248e-18, rel=1e-3, abs=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_are_independent_and_logits_are_not_changed(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 0.0]], dtype=dtype)
    before = logits.clone()
    kept = Sampler(temperature=1.0, top_k=2, top_p=0.9).probabilities(logits)
    assert kept[0].tolist() == about([0, 1, 0])
    assert kept[1].tolist() == about([0.5, 0.5, 0])
    assert logits.equal(before)


# ---- The draws


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, -0.5]])
    assert greedy(logits).tolist() == [1, 0, 3]
    assert greedy(logits).dtype == torch.int64
    assert Sampler(temperature=1.0, top_k=1)(logits).tolist() == [1, 0, 3]


def test_draws_follow_the_distribution() -> None:
    """20,000 draws, each count within 4 standard deviations of its expectation."""
    generator = torch.Generator().manual_seed(5)
    sampler = Sampler(temperature=1.0, generator=generator)
    counts = Counter(sampler(torch.tensor([LOGITS]).expand(20_000, 4)).tolist())
    for token, p in enumerate([0.1, 0.4, 0.2, 0.3]):
        sigma = (20_000 * p * (1 - p)) ** 0.5
        assert abs(counts[token] - 20_000 * p) < 4 * sigma


def test_draws_follow_the_limited_distribution() -> None:
    generator = torch.Generator().manual_seed(6)
    sampler = Sampler(temperature=2.0, top_k=3, top_p=0.7, generator=generator)
    counts = Counter(sampler(torch.tensor([LOGITS]).expand(20_000, 4)).tolist())
    # Square roots of 4, 3 and 2: 0.3857, 0.3340, 0.2727 of the three. Two of them reach 0.7.
    first = 0.535898  # 2 / (2 + √3)
    sigma = (20_000 * first * (1 - first)) ** 0.5
    assert set(counts) == {1, 3}
    assert abs(counts[1] - 20_000 * first) < 4 * sigma


def test_a_generator_makes_draws_repeatable_and_leaves_the_global_one_alone() -> None:
    logits = torch.zeros(64, 50)

    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return Sampler(temperature=1.0, generator=generator)(logits).tolist()

    state = torch.get_rng_state()
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert torch.get_rng_state().equal(state)


def test_one_generator_goes_on_from_draw_to_draw() -> None:
    sampler = Sampler(temperature=1.0, generator=torch.Generator().manual_seed(1))
    logits = torch.zeros(64, 50)
    assert sampler(logits).tolist() != sampler(logits).tolist()


# ---- A seed for each row


@pytest.mark.parametrize("beside", [[], [4], [4, 5, 6]])
@pytest.mark.parametrize("after", [[], [9]])
def test_a_row_draws_the_same_beside_any_others(beside: list[int], after: list[int]) -> None:
    """Twelve steps; each row has logits of its own, which follow from its seed."""

    def drawn(seeds: list[int]) -> list[list[int]]:
        sampler = Sampler(temperature=1.0, top_k=40, top_p=0.9, generator=seeded(seeds))
        given = [torch.randn(12, 50, generator=torch.Generator().manual_seed(s)) for s in seeds]
        logits = torch.stack(given)  # (B, 12, V)
        return [sampler(logits[:, step]).tolist() for step in range(12)]

    alone = [tokens[0] for tokens in drawn([7])]
    assert len(set(alone)) > 6
    assert [tokens[len(beside)] for tokens in drawn([*beside, 7, *after])] == alone


def test_with_one_generator_for_all_a_neighbor_does_change_a_row() -> None:
    """The counterexample: this is what a generator for each row is for."""

    def last(rows: int) -> list[int]:
        sampler = Sampler(temperature=1.0, generator=torch.Generator().manual_seed(7))
        return [sampler(torch.zeros(rows, 50))[-1].item() for _ in range(12)]

    assert last(1) != last(2)


def test_rows_with_generators_follow_the_distribution() -> None:
    sampler = Sampler(temperature=1.0, generator=seeded(range(4000)))
    counts = Counter(sampler(torch.tensor([LOGITS]).expand(4000, 4)).tolist())
    for token, p in enumerate([0.1, 0.4, 0.2, 0.3]):
        assert abs(counts[token] - 4000 * p) < 4 * (4000 * p * (1 - p)) ** 0.5


def test_a_request_gets_the_same_text_beside_any_others() -> None:
    """The same prompt and seed, through a whole generation, first, in the middle and alone."""
    model = toy(seed=0)

    def texts(requests: list[tuple[int, int]]) -> list[list[int]]:
        sampler = Sampler(temperature=1.5, generator=seeded([seed for _, seed in requests]))
        prompts = [text(length, seed=seed) for length, seed in requests]
        return generate_cached(model, prompts, 12, sampler)

    [alone] = texts([(5, 7)])
    assert len(set(alone)) > 3
    assert texts([(5, 7), (5, 8)])[0] == alone
    assert texts([(1, 3), (5, 7), (9, 4)])[1] == alone


# ---- What is not finite

SAMPLERS = [greedy, Sampler(1.0), Sampler(0.1, top_k=2), Sampler(1.0, top_p=0.5)]
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
floats = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32,
                                           torch.float64])  # fmt: skip


@every_sampler
@floats
@pytest.mark.parametrize("place", [0, 3, 40, 99])
@pytest.mark.parametrize("beside", [0.0, float("inf")])
def test_a_model_that_gives_no_number_gives_no_token(
    sampler: Sampler, dtype: torch.dtype, place: int, beside: float
) -> None:
    """JustVugg/colibri#369, vllm-project/vllm#53029: it became an ordinary token."""
    logits = torch.randn(3, 100).to(dtype)
    logits[1, 50], logits[1, place] = beside, float("nan")
    for call in (sampler, sampler.probabilities):
        with pytest.raises(ValueError, match="logits of row 1 of 3 hold not-a-number"):
            call(logits)


@every_sampler
@floats
def test_a_row_in_which_nothing_is_possible(sampler: Sampler, dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 9, dtype=dtype)
    logits[1] = MINUS_INFINITY
    for call in (sampler, sampler.probabilities):
        with pytest.raises(ValueError, match="row 1 of 2 hold nothing but minus infinity"):
            call(logits)


@every_sampler
@floats
def test_infinity_is_chosen(sampler: Sampler, dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 9, dtype=dtype)
    logits[0, 4] = float("inf")
    assert sampler(logits).tolist() == [4]
    assert sampler.probabilities(logits)[0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_several_infinities_share_alike() -> None:
    infinity = float("inf")
    assert distribution([infinity, 0.0, infinity, MINUS_INFINITY]) == [0.5, 0, 0.5, 0]
    logits = torch.tensor([[0.0, infinity, infinity]])
    assert greedy(logits).tolist() == [1]
    assert greedy.probabilities(logits).tolist() == [[0, 1, 0]]


def test_no_rows_give_no_tokens() -> None:
    for sampler in SAMPLERS:
        assert sampler.probabilities(torch.zeros(0, 5)).shape == (0, 5)
    assert greedy(torch.zeros(0, 5)).shape == (0,)


# ---- Settings that make no sense


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_temperature_is_zero_or_above(temperature: float) -> None:
    with pytest.raises(ValueError, match=rf"0 \(greedy\) or above, got {temperature}"):
        Sampler(temperature=temperature)


@pytest.mark.parametrize("k", [0, -3])
def test_top_k_is_at_least_one(k: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, or None for all, got {k}"):
        Sampler(temperature=1.0, top_k=k)


@pytest.mark.parametrize("p", [0.0, -0.5, 1.01, float("nan")])
def test_top_p_is_above_zero_and_at_most_one(p: float) -> None:
    with pytest.raises(ValueError, match=f"above 0 and at most 1, got {p}"):
        Sampler(temperature=1.0, top_p=p)


WRONG = ["0.5", True, False, [1.0], np.float32(0.5), np.array(0.5), torch.tensor(0.5)]


@pytest.mark.parametrize("value", [*WRONG, None, 10**400], ids=repr)
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_settings_are_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*got {re.escape(repr(value)[:60])}"):
        Sampler(**{"temperature": 1.0, name: value})


@pytest.mark.parametrize("value", [*WRONG, 2.0, np.int64(2)], ids=repr)
def test_top_k_is_an_integer(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^top_k must be .*got {re.escape(repr(value)[:60])}"):
        Sampler(temperature=1.0, top_k=value)


def test_a_number_of_numpy_that_is_a_float_is_exact() -> None:
    assert distribution([0.0, log(3)], temperature=np.float64(0.5)) == about([0.1, 0.9])


@pytest.mark.parametrize("value", [5, "cpu", [], [None], [1, 2], {}], ids=repr)
def test_a_generator_is_one_or_a_list(value: Any) -> None:
    with pytest.raises(ValueError, match=r"a list of them with one for each row.*seeded\(\[1, 2"):
        Sampler(temperature=1.0, generator=value)


def test_no_two_rows_share_a_generator() -> None:
    with pytest.raises(ValueError, match="of 2 only 1 are different"):
        Sampler(temperature=1.0, generator=seeded([1]) * 2)


@pytest.mark.parametrize("rows", [1, 3])
def test_there_are_as_many_generators_as_rows(rows: int) -> None:
    with pytest.raises(ValueError, match=f"got {rows} rows of logits, but 2 generators"):
        Sampler(temperature=1.0, generator=seeded([1, 2]))(torch.zeros(rows, 5))


def test_a_generator_of_another_device_is_refused() -> None:
    """The logits are only said to be elsewhere: no second device is needed."""
    generator = torch.Generator()
    with pytest.raises(ValueError, match="generator is on cpu, but the logits are on meta"):
        check_device(generator, torch.zeros(1, 5, device="meta"))


@pytest.mark.parametrize("seeds", [[], 5, None, "12", [True], [1.0], [-1], [2**63], ["a"], {1, 2}])
def test_seeds_are_integers(seeds: Any) -> None:
    with pytest.raises(ValueError, match="seed"):
        seeded(seeds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(5), torch.zeros(1, 2, 5), torch.zeros(1, 0), torch.zeros(1, 5).long(),
        torch.zeros(1, 5).bool(), torch.tensor(1.0),
    ],
    ids=lambda x: f"{x.dtype} {tuple(x.shape)}",
)  # fmt: skip
def test_logits_are_floats_of_one_position(logits: torch.Tensor, temperature: float) -> None:
    sampler = Sampler(temperature=temperature)
    for call in (sampler, sampler.probabilities):
        with pytest.raises(ValueError, match=r"floats of shape \(B, V\), got torch.*logits\[:, -1"):
            call(logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [None, [[1.0, 2.0]], np.zeros((1, 3)), 5, "text"], ids=repr)
def test_logits_are_a_tensor(logits: Any, temperature: float) -> None:
    sampler = Sampler(temperature=temperature)
    for call in (sampler, sampler.probabilities):
        with pytest.raises(ValueError, match=r"must be a tensor of shape \(B, V\), got"):
            call(logits)
