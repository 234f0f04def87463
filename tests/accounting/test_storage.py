"""Bytes of storage from numbers alone, against the tensors of real stores."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from kvbook.accounting.formats import FORMATS, Format, store_format
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layers import full_layer
from kvbook.accounting.need import cache_size
from kvbook.accounting.storage import storage_bytes
from kvbook.cache.codec import FLOAT4, FLOAT8, INT4, INT8, Codec
from kvbook.cache.coded import quantized
from kvbook.cache.layer_kind import LayerKind
from kvbook.cache.store import DenseStore

TYPES = {
    "float64": torch.float64, "float32": torch.float32,
    "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip
PER_CHANNEL = Format("int4", 4, group=1, scale_bits=16, zero_bits=16, group_tokens=32)


def format_of(codec: Codec, dtype: torch.dtype) -> Format:
    """What a codec keeps, said in numbers: scales have the type of the cache, or one byte."""
    tokens, channels = codec.group
    bits = {"int8": 8, "int4": 4, "float8_e4m3": 8, "float4_e2m1": 4}[codec.element]
    scale = 8 if codec.element == "float4_e2m1" else dtype.itemsize * 8
    zero = 0 if codec.symmetric else scale
    return Format(codec.element, bits, channels, scale, zero, group_tokens=tokens)


# ---- Written out


def test_dense_slots() -> None:
    assert storage_bytes(30, 2, 3, 512, 64, 64) == {
        "keys": 30 * 2 * 3 * 512 * 64 * 2, "values": 30 * 2 * 3 * 512 * 64 * 2,
    }  # fmt: skip


def test_four_bits_are_not_a_quarter_of_sixteen() -> None:
    """SmolLM2-135M, 512 slots: 11.25 MiB in bfloat16; 3.2 times less, not 4."""
    dense = sum(storage_bytes(30, 1, 3, 512, 64, 64).values())
    coded = storage_bytes(30, 1, 3, 512, 64, 64, "int4")
    assert dense == 11_796_480
    assert coded == {
        "keys": 1_474_560, "values": 1_474_560, "scales": 368_640, "zero points": 368_640,
    }  # fmt: skip
    assert 10 * dense == 32 * sum(coded.values())


def test_a_scale_per_channel_is_shared_by_tokens() -> None:
    """One head of width 6 over 64 slots: 3 bytes a token; 2 groups of tokens, 6 channels."""
    assert storage_bytes(1, 1, 1, 64, 6, 6, PER_CHANNEL, "float16") == {
        "keys": 64 * 3, "values": 64 * 12, "scales": 2 * 6 * 2, "zero points": 2 * 6 * 2,
    }  # fmt: skip


def test_a_tail_is_dense_and_apart() -> None:
    size = storage_bytes(2, 3, 1, 64, 32, 16, "mxfp4", "bfloat16", tail_slots=5, tail="float32")
    assert size == {
        "keys": 6 * 64 * 16, "values": 6 * 64 * 32, "scales": 6 * 64, "tail": 6 * 5 * (128 + 64),
    }  # fmt: skip


def test_spare_slots_are_slots() -> None:
    """A ring of W = 32 with room to roll back 8: W − 1 + 8 slots."""
    assert storage_bytes(1, 1, 1, 31, 4, 4, spare=8) == {"keys": 39 * 8, "values": 39 * 8}
    assert storage_bytes(1, 1, 1, 31, 32, 32, PER_CHANNEL, spare=33)["scales"] == 2 * 2 * 32 * 2


def test_no_values_are_no_bytes() -> None:
    """A latent of rank 512 with 64 rotated channels: 1,152 bytes a token and layer."""
    assert storage_bytes(1, 1, 1, 1, 576, 0) == {"keys": 1_152, "values": 0}
    assert storage_bytes(1, 1, 1, 1, 576, 0, "int8") == {"keys": 576, "values": 0, "scales": 36}


# ---- Against real tensors


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("codec", [INT8, replace(INT8, symmetric=False), INT4, FLOAT8, FLOAT4,
                                   replace(INT4, symmetric=True)])  # fmt: skip
@pytest.mark.parametrize("group", [(1, 1), (1, 2), (1, 6), (4, 1), (12, 1), (4, 3)])
def test_a_coded_store_allocates_what_is_counted(
    codec: Codec, dtype: str, group: tuple[int, int]
) -> None:
    codec = replace(codec, group=group)
    form = format_of(codec, TYPES[dtype])
    for heads, key_width, value_width in product((1, 3), (6, 18), (6, 0)):
        store = quantized(codec)(LayerKind(heads, key_width, value_width, TYPES[dtype]), 2, 3, 24)
        size = storage_bytes(2, 3, heads, 20, key_width, value_width, form, spare=4)
        pieces = {
            "keys": store.keys.held.codes.nbytes,
            "values": store.values.held.codes.nbytes,
            "scales": store.keys.held.scales.nbytes + store.values.held.scales.nbytes,
            "zero points": store.keys.held.offsets.nbytes + store.values.held.offsets.nbytes,
        }
        assert size == {k: n for k, n in pieces.items() if n or k in ("keys", "values")}
        assert store.allocated_bytes == sum(size.values()) == sum(pieces.values())


@pytest.mark.parametrize("width", [1, 3, 5])
@pytest.mark.parametrize("codec", [INT4, FLOAT4])
def test_odd_widths_take_whole_bytes(codec: Codec, width: int) -> None:
    codec = codec.per_channel(4)
    store = quantized(codec)(LayerKind(1, width, width, torch.float16), 1, 1, 8)
    size = storage_bytes(1, 1, 1, 8, width, width, format_of(codec, torch.float16))
    assert store.allocated_bytes == sum(size.values())


def test_keys_and_values_in_formats_of_their_own() -> None:
    keys, values = INT4.per_channel(8), INT8
    store = quantized(keys, values)(LayerKind(3, 64, 32, torch.bfloat16), 2, 1, 16)
    forms = (format_of(codec, torch.bfloat16) for codec in (keys, values))
    assert store.allocated_bytes == sum(storage_bytes(2, 1, 3, 16, 64, 32, *forms).values())


@pytest.mark.parametrize("dtype", TYPES)
def test_a_dense_store_allocates_what_is_counted(dtype: str) -> None:
    store = DenseStore(LayerKind(3, 6, 4, TYPES[dtype]), 2, 3, 20)
    assert store.allocated_bytes == sum(storage_bytes(2, 3, 3, 20, 6, 4, dtype).values())


CODECS = {"int8": INT8, "int4": INT4, "float8": FLOAT8, "float4": FLOAT4}


@pytest.mark.parametrize("cache", TYPES)
@pytest.mark.parametrize("name", CODECS)
def test_a_format_of_a_codecs_name_is_what_its_store_allocates(name: str, cache: str) -> None:
    """One truth for both: whatever the type of the cache, whose type the scales have."""
    store = quantized(CODECS[name])(LayerKind(5, 64, 32, TYPES[cache]), 2, 3, 24)
    form = store_format(name, cache)
    assert store.allocated_bytes == sum(storage_bytes(2, 3, 5, 24, 64, 32, form).values())
    # and what cache_size says of as many tokens
    geometry = CacheGeometry("one", (full_layer(5, 64, 32),) * 2)
    assert store.allocated_bytes == cache_size(geometry, 24, 3, form).need_bytes


@pytest.mark.parametrize("name", CODECS)
def test_a_format_by_its_name_is_that_of_a_16_bit_cache(name: str) -> None:
    assert FORMATS[name] == store_format(name) == store_format(name, "float16")


@pytest.mark.parametrize("name", CODECS)
def test_other_tiles_have_the_bytes_of_their_stores(name: str) -> None:
    kind = LayerKind(3, 64, 64, torch.bfloat16)
    wide = quantized(CODECS[name].grouped(16))(kind, 1, 2, 32)
    form = FORMATS[name].with_group(16)
    assert wide.allocated_bytes == sum(storage_bytes(1, 2, 3, 32, 64, 64, form).values())
    tall = quantized(CODECS[name].per_channel(8))(kind, 1, 2, 32)
    form = FORMATS[name].per_channel(8)
    assert tall.allocated_bytes == sum(storage_bytes(1, 2, 3, 32, 64, 64, form).values())


def test_no_other_name_is_a_codec() -> None:
    with pytest.raises(ValueError, match="no codec named 'q8_0'; allowed: int8, int4, float8, fl"):
        store_format("q8_0")
    with pytest.raises(ValueError, match="plain number format, got int8; allowed: float64, float3"):
        store_format("int8", "int8")


def test_slots_that_are_full_take_what_cache_size_says() -> None:
    geometry = CacheGeometry("one", (full_layer(3, 64, 32),) * 2)
    size = cache_size(geometry, tokens=24, batch=5, dtype="int4")
    assert size.need == storage_bytes(2, 5, 3, 24, 64, 32, "int4")


# ---- Bad input


def test_one_token_has_no_share_of_a_scale_per_channel() -> None:
    geometry = CacheGeometry("one", (full_layer(3, 64, 64),))
    message = r"int4 shares each scale among 32 tokens, so 1 cannot .* storage_bytes\(\)"
    with pytest.raises(ValueError, match=message):
        cache_size(geometry, tokens=32, dtype=PER_CHANNEL)
    with pytest.raises(ValueError, match=message):
        PER_CHANNEL.vector_bytes(64)


def test_slots_must_be_whole_groups_of_tokens() -> None:
    with pytest.raises(
        ValueError, match="32 tokens, so 48 cannot be counted alone; give a multiple"
    ):
        storage_bytes(1, 1, 1, 48, 6, 6, PER_CHANNEL)


@pytest.mark.parametrize(
    ("name", "least"),
    [("layers", 1), ("rows", 1), ("heads", 1), ("slots", 1), ("key_width", 1), ("value_width", 0),
     ("spare", 0), ("tail_slots", 0)],
)  # fmt: skip
def test_counts_have_a_least(name: str, least: int) -> None:
    numbers: dict[str, Any] = {
        "layers": 1, "rows": 1, "heads": 1, "slots": 1, "key_width": 1, "value_width": 1,
    }  # fmt: skip
    storage_bytes(**numbers | {name: least})
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {least - 1}"):
        storage_bytes(**numbers | {name: least - 1})


def test_a_group_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="group of 32 does not divide a vector of 6 elements"):
        storage_bytes(1, 1, 1, 4, 64, 6, "int8")


def test_tokens_share_scales_only_where_there_are_scales() -> None:
    with pytest.raises(ValueError, match="32 tokens cannot share scales that do not exist"):
        Format("odd", 4, group_tokens=32)
    with pytest.raises(ValueError, match="group_tokens must be at least 1, got 0"):
        replace(PER_CHANNEL, group_tokens=0)


def test_a_scale_per_channel_in_words() -> None:
    assert PER_CHANNEL.describe() == (
        "int4: 4 bits per element, and a 16-bit scale and a 16-bit zero point for each element of "
        "one head's vector of 32 tokens together"
    )
