"""From logits to a token: exact distributions on small logits, then the draws."""

from collections import Counter
from math import log

import pytest
import torch

from kvbook.generate import Sampler, greedy

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


def test_a_greedy_choice_has_no_distribution() -> None:
    with pytest.raises(ValueError, match="set temperature"):
        greedy.probabilities(torch.zeros(1, 3))
