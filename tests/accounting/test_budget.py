"""What fits into a budget: searched exactly, against counting up one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbook.accounting.budget import max_sequences, max_tokens
from kvbook.accounting.gallery import gallery_model
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layers import (
    Kept,
    Layer,
    compressed_layer,
    cross_layer,
    full_layer,
    recurrent_layer,
    window_layer,
)
from kvbook.accounting.need import CacheSize, cache_size

GIB = 1024**3
FULL = full_layer(1, 2, 2)  # 8 bytes per token at 16 bits
WINDOW = window_layer(10, 1, 4, 4)  # 16 bytes per token, 160 at most
STATE = recurrent_layer((Kept("recurrent state", 5, 5),))  # 100 bytes per sequence


def toy(*layers: Layer, tokens: int = 1, batch: int = 1, block_size: int = 1) -> CacheSize:
    return cache_size(CacheGeometry("toy", layers), tokens, batch, block_size=block_size)


def test_llama_3_8b_in_80_gib() -> None:
    size = cache_size(gallery_model("llama-3-8b").geometry, 4_096)
    assert max_tokens(size, 80 * GIB) == 655_360
    assert max_sequences(size, 80 * GIB) == 160


def test_a_log_of_an_engine() -> None:
    """3.81 GiB (of 3.8125) became 1,952 blocks of 16 for Llama-3.1-8B."""
    size = cache_size(gallery_model("llama-3.1-8b").geometry, 1)
    assert max_tokens(size, 61 * GIB // 16, reserved=True) == 1_952 * 16


def test_one_byte_less_is_one_token_less() -> None:
    assert max_tokens(toy(FULL), 80) == 10
    assert max_tokens(toy(FULL), 79) == 9
    assert max_tokens(toy(FULL), 7) == 0


def test_a_window_bends_the_curve() -> None:
    """By the first slope of 24 B, 1,000 B would hold 41 tokens; by the last one 125."""
    size = toy(FULL, WINDOW)
    assert max_tokens(size, 1_000) == (1_000 - 160) // 8 == 105
    assert max_tokens(size, 100) == 4


def test_a_reservation_comes_in_blocks_and_knows_no_window() -> None:
    size = toy(FULL, WINDOW, block_size=16)
    assert max_tokens(size, 1_000, reserved=True) == 32  # 2 · 16 · 24 = 768, a third needs 1,152
    assert max_tokens(size, 383, reserved=True) == 0


def test_windows_alone_have_no_limit_once_they_fit() -> None:
    assert max_tokens(toy(WINDOW), 160) is None
    assert max_tokens(toy(WINDOW), 159) == 9
    assert max_tokens(toy(WINDOW), 160, reserved=True) == 10


def test_a_model_without_a_growing_cache_has_no_limit() -> None:
    assert max_tokens(toy(STATE), 100) is None
    assert max_tokens(toy(STATE), 99) == 0


def test_a_constant_state_takes_its_part() -> None:
    size = toy(FULL, STATE)
    assert max_tokens(size, 180) == 10
    assert max_sequences(size, 1_080) == 10
    assert max_tokens(size, 99) == 0


def test_the_other_sequences_count() -> None:
    assert max_tokens(toy(FULL, batch=3), 100) == 4
    assert max_sequences(toy(FULL, tokens=10), 799) == 9
    assert max_sequences(toy(FULL, tokens=10, block_size=16), 1_000, reserved=True) == 7


@given(
    budget=st.integers(1, 3_000),
    batch=st.integers(1, 4),
    block_size=st.integers(1, 20),
    layers=st.lists(st.sampled_from([FULL, WINDOW, STATE]), min_size=1, max_size=3),
    reserved=st.booleans(),
)
def test_as_counted_up_one_by_one(
    budget: int, batch: int, block_size: int, layers: list[Layer], reserved: bool
) -> None:
    def bytes_of(tokens: int, rows: int) -> int:
        size = toy(*layers, tokens=tokens, batch=rows, block_size=block_size)
        return (size.reserved_bytes if reserved else size.need_bytes) + size.constant_state_bytes

    most, limit = 0, 400  # 400 tokens are beyond every window and every budget that has a limit
    while most < limit and bytes_of(most + 1, batch) <= budget:
        most += 1
    found = max_tokens(toy(*layers, batch=batch, block_size=block_size), budget, reserved)
    assert found == (None if most == limit else most)

    rows = 0
    while rows < limit and bytes_of(5, rows + 1) <= budget:
        rows += 1
    assert max_sequences(toy(*layers, tokens=5, block_size=block_size), budget, reserved) == rows


def test_a_budget_is_one_devices_and_groups_multiply_the_sequences() -> None:
    size = cache_size(CacheGeometry("toy", (FULL,)), 10, dp=3)
    assert max_sequences(size, 250) == 3 * 3


def test_devices_that_share_tokens_hold_so_many_times_more() -> None:
    size = cache_size(CacheGeometry("toy", (FULL,)), 10, cp=4)
    assert max_tokens(size, 80) == 40


def test_entries_that_tokens_share_end_with_the_last_whole_one() -> None:
    """4 tokens make an entry of 8 bytes: 80 bytes hold 10 entries, so 43 tokens."""
    size = cache_size(CacheGeometry("toy", (compressed_layer(4, 4),)), 1)
    assert max_tokens(size, 80) == 43


def test_a_source_alone_has_no_limit() -> None:
    size = cache_size(CacheGeometry("toy", (cross_layer(10, 1, 2, 2),)), 1)
    assert max_tokens(size, 80) is None
    assert max_tokens(size, 79) == 0


def test_a_window_of_entries_is_as_many_tokens_as_make_them() -> None:
    """Three entries of 4 tokens, 32 bytes each: two fit, and token 12 brings the third."""
    size = toy(Layer("window", (Kept("keys", 1, 16),), window=3, every=4))
    assert [max_tokens(size, budget) for budget in (31, 64, 95)] == [3, 11, 11]
    assert max_tokens(size, 96) is None


@pytest.mark.parametrize("budget", [0, -1, 1.5, "80GiB"])
def test_a_budget_is_a_positive_whole_number(budget: int) -> None:
    for fit in (max_tokens, max_sequences):
        with pytest.raises(ValueError, match=r"budget must be .*at least 1"):
            fit(toy(FULL), budget)


def test_sequences_that_cost_nothing_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match="takes no cache"):
        max_sequences(toy(recurrent_layer(())), 100)
