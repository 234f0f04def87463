"""Sizes of caches: need, reservation, scales, slopes, devices, and the words beside them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbook.accounting.formats import Format
from kvbook.accounting.gallery import gallery_model
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layers import (
    Kept,
    Layer,
    compressed_layer,
    cross_layer,
    empty_layer,
    full_layer,
    latent_layer,
    recurrent_layer,
    window_layer,
)
from kvbook.accounting.need import cache_size
from kvbook.cache import DenseStore
from kvbook.cache.layer_kind import LayerKind
from kvbook.config import ModelConfig
from kvbook.model.transformer import Transformer

FULL = full_layer(kv_heads=2, key_width=8, value_width=4)  # 2 · (8 + 4) = 24 elements per token
WINDOW = window_layer(window=10, kv_heads=1, key_width=8, value_width=8)  # 16 elements per token


def geometry(*layers: Layer) -> CacheGeometry:
    return CacheGeometry("toy", layers)


# ---- Need


def test_keys_and_values_have_their_own_widths() -> None:
    size = cache_size(geometry(FULL), tokens=5, batch=3)
    assert size.need == {"keys": 3 * 5 * 2 * 8 * 2, "values": 3 * 5 * 2 * 4 * 2}
    assert size.need_bytes == 720


@pytest.mark.parametrize(("tokens", "need"), [(9, 9 * 32), (10, 320), (11, 320), (1_000, 320)])
def test_a_window_holds_at_most_w_tokens(tokens: int, need: int) -> None:
    assert cache_size(geometry(WINDOW), tokens).need_bytes == need


def test_layers_add_up() -> None:
    size = cache_size(geometry(FULL, WINDOW, FULL), tokens=100)
    assert size.need_bytes == 2 * 100 * 48 + 10 * 32
    assert size.window_bytes_full == 10 * 32
    assert cache_size(geometry(FULL, WINDOW), tokens=4, batch=3).window_bytes_full == 3 * 10 * 32


def test_slopes_are_of_one_sequence() -> None:
    short, long = (cache_size(geometry(FULL, WINDOW), tokens=n, batch=7) for n in (9, 10))
    assert short.bytes_per_token == long.bytes_per_token == 48 + 32
    assert short.bytes_per_token_beyond_windows == 48
    assert short.next_token_bytes == 80  # the window has room for one more
    assert long.next_token_bytes == 48


# ---- Reservation


@pytest.mark.parametrize(("tokens", "slots"), [(1, 16), (16, 16), (17, 32), (100, 112)])
def test_whole_blocks_are_reserved(tokens: int, slots: int) -> None:
    assert cache_size(geometry(FULL), tokens, batch=3).reserved_bytes == 3 * slots * 48


def test_windows_are_reserved_in_full() -> None:
    size = cache_size(geometry(FULL, WINDOW), tokens=100, block_size=1)
    assert size.reserved_bytes == 100 * (48 + 32)
    assert size.reservation == {"keys": 100 * (32 + 16), "values": 100 * (16 + 16)}


def test_a_block_table_has_four_bytes_per_block() -> None:
    assert cache_size(geometry(FULL, FULL), tokens=33, batch=5).block_table_bytes == 5 * 3 * 4


# ---- Latents, index keys, states


LATENT = latent_layer(rank=512, rope_width=64, heads=128, nope_width=128, value_width=128)


def test_a_latent_layer_stores_no_values() -> None:
    """1,152 B per token and layer; expanded it would be 81,920 B, 71.1 times as much."""
    size = cache_size(geometry(LATENT), tokens=1)
    assert size.need == {"latents": 1_152}
    assert size.expanded_bytes_per_token == 81_920
    assert round(81_920 / 1_152, 1) == 71.1


def test_elements_of_deepseek_v2_lite_latent_and_expanded() -> None:
    model = gallery_model("deepseek-v2-lite").geometry
    size = cache_size(model, tokens=1, dtype="8bit")
    assert size.bytes_per_token == 27 * 576
    assert size.expanded_bytes_per_token == 27 * 5_120
    assert cache_size(geometry(FULL), tokens=1).expanded_bytes_per_token is None


def test_index_keys_are_an_item_of_their_own() -> None:
    size = cache_size(geometry(LATENT.with_index_keys(128)), tokens=10)
    assert size.need == {"latents": 11_520, "index keys": 2_560}
    assert any("index keys" in words for words in size.assumptions)


def test_a_constant_state_is_listed_and_not_counted() -> None:
    state = (Kept("recurrent state", 4, 30), Kept("convolution state", 44, 3))
    size = cache_size(geometry(FULL, recurrent_layer(state)), tokens=5, batch=2)
    assert size.constant_state_bytes == 2 * (4 * 30 + 44 * 3) * 4
    assert size.need_bytes == 2 * 5 * 48
    assert size.reserved_bytes == 2 * 16 * 48
    assert "constant state of recurrent layers (listed apart)" in size.exclusions


def test_a_state_of_unknown_size_is_not_a_zero() -> None:
    size = cache_size(geometry(FULL, recurrent_layer(None)), tokens=5)
    assert size.constant_state_bytes is None
    assert any("does not say how large" in words for words in size.exclusions)


def test_without_recurrent_layers_the_state_is_zero() -> None:
    size = cache_size(geometry(FULL, empty_layer()), tokens=5)
    assert size.constant_state_bytes == 0
    assert not any("recurrent" in words for words in (*size.assumptions, *size.exclusions))


def test_states_of_real_models() -> None:
    jamba = cache_size(gallery_model("jamba-v0.1").geometry, tokens=1)
    assert jamba.constant_state_bytes == 28 * (8_192 * 16 + 8_192 * 3) * 4
    minimax = cache_size(gallery_model("minimax-text-01").geometry, tokens=1)
    assert minimax.constant_state_bytes == 70 * 64 * 128 * 128 * 4


# ---- Formats


@pytest.mark.parametrize(
    ("dtype", "need"),
    [
        ("float64", {"keys": 512, "values": 512}),
        ("float32", {"keys": 256, "values": 256}),
        ("bf16", {"keys": 128, "values": 128}),
        ("fp8", {"keys": 64, "values": 64}),
        ("4bit", {"keys": 32, "values": 32}),
        ("int8", {"keys": 64, "values": 64, "scales": 2 * 2 * 2}),
        ("int4", {"keys": 32, "values": 32, "scales": 8, "zero points": 8}),
        ("mxfp4", {"keys": 32, "values": 32, "scales": 4}),
    ],
)
def test_one_token_of_one_head_of_64(dtype: str, need: dict[str, int]) -> None:
    size = cache_size(geometry(full_layer(1, 64, 64)), tokens=1, dtype=dtype)
    assert size.need == need
    assert size.need_bytes == sum(need.values())


def test_scales_count_in_slopes_and_windows_too() -> None:
    layers = full_layer(1, 64, 64), window_layer(10, 1, 64, 64)
    size = cache_size(geometry(*layers), tokens=100, dtype="mxfp4")
    assert size.bytes_per_token == 2 * 68
    assert size.bytes_per_token_beyond_windows == 68
    assert size.window_bytes_full == 10 * 68
    assert size.reserved_bytes == 112 * 2 * 68


def test_four_bits_with_scales_are_not_four_times_less() -> None:
    model = gallery_model("llama-3-8b").geometry
    sixteen, four = (cache_size(model, 4096, dtype=d).need_bytes for d in ("bf16", "int4"))
    assert sixteen * 5 == four * 16


@pytest.mark.parametrize("layer", [full_layer(1, 48, 64), full_layer(1, 64, 48)])
def test_a_group_must_divide_the_width(layer: Layer) -> None:
    with pytest.raises(ValueError, match=r"group of 32 does not divide.*48.*divisor of 48"):
        cache_size(geometry(layer), tokens=1, dtype="int8")


# ---- Devices


@pytest.mark.parametrize(
    ("heads", "devices", "each"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (8, 16, 1), (6, 4, 2)]
)
def test_kv_heads_are_shared_and_repeated(heads: int, devices: int, each: int) -> None:
    size = cache_size(geometry(full_layer(heads, 64, 64)), tokens=10, devices=devices)
    assert size.need_bytes == 10 * each * 2 * 64 * 2


def test_latents_and_index_keys_are_on_every_device() -> None:
    layer = LATENT.with_index_keys(128)
    one, eight = (cache_size(geometry(layer), 10, devices=n) for n in (1, 8))
    assert one.need == eight.need
    assert eight.expanded_bytes_per_token == (128 // 8 * (192 + 128) + 128) * 2


def test_states_are_shared_by_heads() -> None:
    layer = recurrent_layer((Kept("recurrent state", 4, 30),))
    assert cache_size(geometry(layer), 1, devices=2).constant_state_bytes == 2 * 30 * 4


@pytest.mark.parametrize(("batch", "groups", "here"), [(8, 4, 2), (7, 4, 2), (3, 4, 1)])
def test_groups_of_devices_share_the_sequences(batch: int, groups: int, here: int) -> None:
    size = cache_size(geometry(FULL), 10, batch, dp=groups)
    assert size.sequences == here
    assert size.need_bytes == here * 10 * 48
    assert size.block_table_bytes == here * 4


def test_devices_share_the_tokens_of_a_sequence() -> None:
    """101 tokens on 4 devices, one after the other: 26 on the fullest; of a window of 10, 3."""
    size = cache_size(geometry(FULL, WINDOW), 101, cp=4)
    assert size.need_bytes == 26 * 48 + 3 * 32
    assert size.reserved_bytes == 32 * (48 + 32)
    assert size.window_bytes_full == 3 * 32
    assert size.next_token_bytes == 0  # token 102 goes to the second device
    assert cache_size(geometry(FULL, WINDOW), 104, cp=4).next_token_bytes == 48


def test_latents_can_be_shared_by_tokens_and_not_by_heads() -> None:
    whole, heads, tokens = (
        cache_size(geometry(LATENT), 1_000, **share).need_bytes
        for share in ({}, {"devices": 8}, {"cp": 8})
    )
    assert whole == heads == 8 * tokens


def test_shares_are_named() -> None:
    size = cache_size(geometry(FULL), 10, 5, dp=2, cp=3)
    assert "2 groups of devices share the sequences; this device has 3 sequences" in (
        size.assumptions
    )
    assert any(words.startswith("3 devices share the tokens") for words in size.assumptions)


# ---- Entries that tokens share, sources, and keys that serve as values


def test_tokens_that_share_an_entry() -> None:
    """4 tokens make an entry of 64 elements: 128 bytes; a rest makes none."""
    sizes = {n: cache_size(geometry(compressed_layer(4, 64)), n) for n in (3, 4, 7, 8, 100)}
    assert [size.need_bytes for size in sizes.values()] == [0, 128, 128, 256, 25 * 128]
    assert {size.bytes_per_token for size in sizes.values()} == {32}
    assert [sizes[n].next_token_bytes for n in (3, 4, 7)] == [128, 0, 128]
    assert sizes[100].reserved_bytes == 28 * 128  # the entries of 112 tokens, 7 blocks of 16


@pytest.mark.parametrize(("every", "entries"), [(5, 23), (16, 7), (128, 1)])
def test_a_block_that_is_not_a_whole_number_of_entries_is_rounded_up(
    every: int, entries: int
) -> None:
    """100 tokens in 7 blocks are 112 slots; two sequences of them."""
    size = cache_size(geometry(compressed_layer(every, 64)), 100, batch=2)
    assert size.reserved_bytes == 2 * entries * 128


def test_a_mean_that_is_not_whole_is_rounded_up() -> None:
    layers = compressed_layer(3, 1), compressed_layer(2, 1)  # 2 / 3 + 2 / 2 bytes per token
    assert cache_size(geometry(*layers), 6).bytes_per_token == 2


def test_a_source_is_constant_while_the_answer_grows() -> None:
    cross = cross_layer(20, 1, 8, 8)  # 20 · 32 bytes
    short, long = (cache_size(geometry(FULL, cross), n) for n in (1, 1_000))
    assert short.need_bytes == 48 + 640
    assert long.need_bytes == 48_000 + 640
    assert long.reserved_bytes == 1_008 * 48 + 32 * 32  # 63 blocks of 16, and 2 for the source
    assert long.bytes_per_token == long.bytes_per_token_beyond_windows == 48


def test_devices_share_the_tokens_of_a_source_too() -> None:
    """100 tokens on 3 devices are 34 on the fullest, in 3 blocks of 16."""
    size = cache_size(geometry(cross_layer(100, 1, 8, 8)), 1, batch=2, cp=3)
    assert (size.need_bytes, size.reserved_bytes) == (2 * 34 * 32, 2 * 48 * 32)


def test_keys_that_serve_as_values_once_and_twice() -> None:
    size = cache_size(geometry(full_layer(2, 8, 8).with_keys_as_values(), FULL), 10, 3)
    assert size.need_bytes == 3 * 10 * (64 + 48)
    assert size.need_bytes_stored_once == 3 * 10 * (32 + 48)
    assert cache_size(geometry(FULL), 10).need_bytes_stored_once is None


def test_what_the_reading_took_for_granted_is_said() -> None:
    shape = CacheGeometry("toy", (FULL,), assumptions=("head_dim = 8 is stated by the caller",))
    assert "head_dim = 8 is stated by the caller" in cache_size(shape, 1).assumptions


# ---- Words


def test_the_answer_says_what_it_assumes_and_leaves_out() -> None:
    size = cache_size(gallery_model("gemma-2-27b").geometry, 10_000, 2, "int8", devices=4)
    assert size.assumptions == (
        "int8: 8 bits per element, and a 16-bit scale for each 32 elements of one head's vector "
        "of one token",
        "need: 2 sequences, each with 10,000 tokens, of which windowed layers hold at most W, the "
        "newest included",
        "reservation: whole blocks of 16 tokens for each sequence, windowed layers charged in full",
        "sizes are for one of 4 devices, with KV heads / 4 rounded up; where there are fewer "
        "heads than devices, heads and latents are repeated",
        "10,000 tokens are more than the model's 8,192 positions",
    )
    assert size.exclusions == (
        "weights, activations and workspaces of kernels",
        "allocator rounding, blocks kept for prefix reuse, tokens drafted ahead",
        "block tables (listed apart)",
    )


def test_a_prediction_layer_is_named_as_left_out() -> None:
    """Counted for one model and not for another, it makes tables disagree: 1,152 B per token."""
    size = cache_size(gallery_model("deepseek-v3").geometry, 1)
    assert "caches of extra layers that predict further tokens (1 of them)" in size.exclusions
    assert size.bytes_per_token == 61 * 1_152


# ---- Against what is allocated


DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@given(sizes=st.tuples(*[st.integers(1, high) for high in (3, 3, 4, 20, 24, 24)]))
def test_a_dense_store_allocates_what_is_counted(dtype: str, sizes: tuple[int, ...]) -> None:
    layers, rows, heads, slots, key_width, value_width = sizes
    store = DenseStore(LayerKind(heads, key_width, value_width, DTYPES[dtype]), layers, rows, slots)
    counted = cache_size(
        geometry(*[full_layer(heads, key_width, value_width)] * layers), slots, rows, dtype
    )
    assert counted.need_bytes == store.allocated_bytes
    assert counted.bytes_per_token == store.bytes_per_slot


@pytest.mark.parametrize("window", [None, 6])
def test_a_model_of_ours_allocates_what_is_counted(window: int | None) -> None:
    config = ModelConfig(
        vocab_size=16, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=6, d_mlp=8,
        window=window,
    )  # fmt: skip
    cache = Transformer(config).new_cache(batch=2, capacity=10)
    cache.reserve([4, 4], 4)
    shape = CacheGeometry.from_model(config)
    assert cache_size(shape, tokens=4, batch=2, dtype="float32").need_bytes == cache.used_bytes
    # The contiguous placement keeps all slots of a windowed model, as a reservation does.
    full = cache_size(shape, tokens=10, batch=2, dtype="float32", block_size=1)
    assert full.reserved_bytes == cache.allocated_bytes


# ---- Bad input


@pytest.mark.parametrize("name", ["tokens", "batch", "block_size", "devices", "dp", "cp"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, None])
def test_counts_are_positive_whole_numbers(name: str, value: object) -> None:
    arguments: dict[str, Any] = {"tokens": 1, name: value}
    with pytest.raises(ValueError, match=rf"{name} must be .*at least 1, got"):
        cache_size(geometry(FULL), **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: full_layer(0, 8, 8), r"heads of keys must be at least 1, got 0"),
        (lambda: full_layer(1, -8, 8), r"width of keys must be at least 1, got -8"),
        (lambda: window_layer(0, 1, 8, 8), r"window must be at least 1, got 0"),
        (lambda: latent_layer(0, 64, 8, 8, 8), r"rank must be at least 1, got 0"),
        (lambda: CacheGeometry("empty", ()), r"layers must name at least one layer, got \(\)"),
    ],
)
def test_sizes_of_layers_are_positive(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_bare_number_is_no_dtype() -> None:
    with pytest.raises(ValueError, match="bits or bytes"):
        cache_size(geometry(FULL), 1, dtype=2)  # type: ignore[arg-type]


def test_a_format_of_ones_own() -> None:
    symmetric = Format("int4, symmetric", 4, group=16, scale_bits=8)
    size = cache_size(geometry(full_layer(1, 64, 64)), 1, dtype=symmetric)
    assert size.need == {"keys": 32, "values": 32, "scales": 8}
