"""What is left for a cache on a card: every line, worked out by hand."""

from fractions import Fraction
from typing import Any

import pytest

from kvbook.accounting.budget import max_tokens
from kvbook.accounting.card import Weights, card_budget
from kvbook.accounting.gallery import gallery_model
from kvbook.accounting.need import cache_size
from kvbook.accounting.presets import PRESETS

MIB, GIB = 1024**2, 1024**3


def test_llama_3_8b_on_an_h100() -> None:
    """81,559 MiB, nine tenths of it, less 8.03 · 10⁹ weights of 2 bytes and 2 GiB."""
    memory = PRESETS["H100-SXM"].memory
    assert memory == 85_520_809_984
    left = card_budget(memory, "0.9", Weights.parse("8.03B@16"), 2 * GIB)
    assert left.lines == (
        ("memory", 85_520_809_984),
        ("of which the engine uses 90 %", 76_968_728_985),
        ("weights, 8.03B parameters at 16 bits", -16_060_000_000),
        ("activations and workspaces, as given", -2_147_483_648),
        ("left for the cache", 58_761_245_337),
    )
    assert left.cache_bytes == 58_761_245_337
    size = cache_size(gallery_model("llama-3-8b").geometry, 8_192)
    assert max_tokens(size, left.cache_bytes) == 58_761_245_337 // 131_072 == 448_312


def test_memory_alone() -> None:
    left = card_budget(1_000)
    assert left.lines == (("memory", 1_000), ("left for the cache", 1_000))


def test_devices_share_the_weights() -> None:
    left = card_budget(10_000, weights=Weights(3_001, "odd"), devices=2)
    assert left.lines[1] == ("weights, odd, 1 / 2 of them", -1_501)
    assert left.cache_bytes == 8_499


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        ("8B@16", 16 * 10**9, "8B parameters at 16 bits"),
        ("8.03B@16bit", 16_060_000_000, "8.03B parameters at 16 bits"),
        ("70.6B @ 4.5 bits", 39_712_500_000, "70.6B parameters at 4.5 bits"),
        ("135M@16", 270_000_000, "135M parameters at 16 bits"),
        ("1T@4", 500_000_000_000, "1T parameters at 4 bits"),
        ("16.1GB", 16_100_000_000, "as given"),
        ("15 GiB", 15 * GIB, "as given"),
        ("3M@1.5", 562_500, "3M parameters at 1.5 bits"),
    ],
)
def test_weights_as_people_write_them(text: str, size: int, words: str) -> None:
    assert Weights.parse(text) == Weights(size, words)


@pytest.mark.parametrize(
    "text", ["8B", "8", "B@16", "8@16", "8B@", "-8B@16", "8B@16x", "", "8b@16", "８B@16", None, 8]
)
def test_weights_that_could_mean_two_things_are_refused(text: Any) -> None:
    """8B: eight bytes, or eight billion parameters of unknown bits?"""
    with pytest.raises(ValueError, match=r"weights are parameters at bits per weight.*8.03B@16"):
        Weights.parse(text)


@pytest.mark.parametrize("text", ["0B@16", "8B@0", "8B@65", "8B@128"])
def test_impossible_weights(text: str) -> None:
    with pytest.raises(ValueError, match="weights need parameters above 0 and bits from above 0"):
        Weights.parse(text)


def test_nothing_left_says_by_how_much() -> None:
    with pytest.raises(
        ValueError,
        match=r"nothing is left .*memory: 1 GiB; weights, as given: 2 GiB; 1 GiB too much",
    ):
        card_budget(GIB, weights=Weights.parse("2GiB"))
    with pytest.raises(ValueError, match="nothing is left"):
        card_budget(GIB, reserve=GIB)
    assert card_budget(GIB, reserve=GIB - 1).cache_bytes == 1


@pytest.mark.parametrize(
    ("share", "usable"),
    [("0.92", 920), ("92%", 920), (0.92, 920), (1, 1_000), (Fraction(1, 3), 333)],
)
def test_a_share_is_taken_exactly(share: Any, usable: int) -> None:
    """0.92 of 1,000 is 920, although 0.92 · 1,000 in floats is 920.0000000000001 or less."""
    assert card_budget(1_000, share).cache_bytes == usable


@pytest.mark.parametrize(
    "share",
    [0, -0.5, 1.1, "90", "0%", "101%", "x", "", None, True, float("nan"), [], "1/0", "1e-1"],
)
def test_a_share_is_above_0_and_at_most_1(share: Any) -> None:
    with pytest.raises(ValueError, match=r"a share .*above 0 and at most 1, got"):
        card_budget(1_000, share)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 0}, "memory must be at least 1, got 0"),
        ({"memory": 1e9}, "memory must be a whole number"),
        ({"reserve": -1}, "reserve must be at least 0, got -1"),
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"weights": "8B@16"}, r"weights must be Weights, got '8B@16'; use Weights.parse"),
    ],
)
def test_impossible_lines(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        card_budget(**{"memory": 10**9, **change})


@pytest.mark.parametrize(
    ("text", "size"), [("0.000009M@1", 2), ("0.000008M@1", 1), ("1M@64", 8_000_000)]
)
def test_weights_take_whole_bytes_of_at_most_64_bits(text: str, size: int) -> None:
    assert Weights.parse(text).total_bytes == size
