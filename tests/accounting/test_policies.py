"""What engines set aside for the same texts, worked out by hand."""

import re

import pytest

from kvbook.accounting.gallery import gallery_model, load_gallery
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layers import (
    Kept,
    compressed_layer,
    full_layer,
    recurrent_layer,
    window_layer,
)
from kvbook.accounting.need import CacheSize, cache_size
from kvbook.accounting.policies import POLICIES
from kvbook.errors import UnsupportedModelError

FULL = full_layer(2, 64, 64)  # 512 bytes per token at 16 bits
LOCAL = window_layer(100, 2, 64, 64)
STATE = recurrent_layer((Kept("recurrent state", 2, 5),))  # 40 bytes per sequence


def toy(tokens: int = 1_000, batch: int = 1) -> CacheSize:
    return cache_size(CacheGeometry("toy", (FULL, LOCAL, LOCAL)), tokens, batch)


BYTES = {
    "whole text": 3 * 1_008 * 512,  # blocks of 16: 63 of them
    "ring": (1_000 + 2 * 100) * 512,
    "pool per kind": (63 + 2 * 7) * 16 * 512,  # tokens 900 … 999 lie in 7 blocks
    "pool per layer": (63 + 2 * 7) * 16 * 512,
    "cells": (1_024 + 2 * 768) * 512,  # 1,000 and 100 + 512, each up to a multiple of 256
}


@pytest.mark.parametrize("name", BYTES)
def test_one_full_and_two_windowed_layers(name: str) -> None:
    assert POLICIES[name].bytes(toy()) == BYTES[name]


def test_these_are_all() -> None:
    assert list(POLICIES) == list(BYTES)


@pytest.mark.parametrize("name", ["whole text", "ring", "pool per kind", "pool per layer"])
def test_sequences_add_up(name: str) -> None:
    assert POLICIES[name].bytes(toy(batch=3)) == 3 * BYTES[name]


def test_cells_are_shared_by_sequences() -> None:
    """3,000 cells, and 3 · 100 + 512 for windows."""
    assert POLICIES["cells"].bytes(toy(batch=3)) == (3_072 + 2 * 1_024) * 512


def test_a_short_text_takes_no_more_cells_than_it_has() -> None:
    assert POLICIES["cells"].bytes(toy(tokens=200)) == 3 * 256 * 512


def test_padding_makes_the_pool_dearer_than_pools_of_their_own() -> None:
    """gemma-3-27b at 32,768 tokens: 8 of 70 layers hold nothing, 64 blocks of each window."""
    size = cache_size(gallery_model("gemma-3-27b").geometry, 32_768)
    pool, own = (POLICIES[name].bytes(size) for name in ("pool per kind", "pool per layer"))
    assert pool - own == 8 * 1_024 * 8_192
    assert own == (10 * 32_768 + 52 * 1_024) * 8_192


def test_layers_that_differ_in_bytes_share_a_page() -> None:
    """256 bytes beside 512: a full block holds 32 tokens, a windowed one 16."""
    size = cache_size(CacheGeometry("toy", (full_layer(1, 64, 64), LOCAL)), 1_000)
    assert POLICIES["pool per kind"].bytes(size) == (32 + 7) * 16 * 512
    assert POLICIES["pool per layer"].bytes(size) == 63 * 16 * 256 + 7 * 16 * 512


def test_states_are_counted_by_all() -> None:
    size = cache_size(CacheGeometry("toy", (FULL, STATE)), 1_000)
    assert POLICIES["ring"].bytes(size) == 1_000 * 512 + 40
    assert POLICIES["whole text"].bytes(size) == 1_008 * 512 + 40
    assert POLICIES["pool per layer"].bytes(size) == 1_008 * 512 + 40
    assert POLICIES["cells"].bytes(size) == 1_024 * 512 + 40
    assert POLICIES["pool per kind"].bytes(size) == (63 + 2) * 16 * 512


@pytest.mark.parametrize("name", BYTES)
def test_a_state_of_unknown_size_is_refused(name: str) -> None:
    size = cache_size(CacheGeometry("toy", (FULL, recurrent_layer(None))), 10)
    with pytest.raises(UnsupportedModelError, match="does not say how large"):
        POLICIES[name].bytes(size)


@pytest.mark.parametrize("name", load_gallery())
def test_no_policy_of_a_real_model_is_below_its_need(name: str) -> None:
    size = cache_size(gallery_model(name).geometry, 20_000, batch=2)
    for policy in POLICIES.values():
        if size.constant_state_bytes == 0:
            assert policy.bytes(size) >= size.need_bytes


@pytest.mark.parametrize("name", BYTES)
def test_every_policy_says_who_does_it_and_where_it_is_written(name: str) -> None:
    policy = POLICIES[name]
    assert policy.rule
    for who in policy.who:
        assert re.fullmatch(r".+ \(20\d\d\): https://\S+", who)


@pytest.mark.parametrize("wrong", [None, 5, "llama-3-8b", CacheGeometry("toy", (FULL,))])
def test_a_policy_takes_a_size(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"size must be a CacheSize, got .* use cache_size"):
        POLICIES["ring"].bytes(wrong)  # type: ignore[arg-type]


def test_a_compressed_history_has_fewer_entries() -> None:
    """4 tokens make an entry of 128 bytes: 250 entries of 1,000 tokens, in 16 blocks of 16."""
    size = cache_size(CacheGeometry("toy", (compressed_layer(4, 64),)), 1_000)
    assert POLICIES["ring"].bytes(size) == 250 * 128
    assert POLICIES["whole text"].bytes(size) == 252 * 128  # the entries of 1,008 tokens
    assert POLICIES["pool per layer"].bytes(size) == 256 * 128
    assert POLICIES["cells"].bytes(size) == 256 * 128
    with pytest.raises(UnsupportedModelError, match="4 tokens share an entry"):
        POLICIES["pool per kind"].bytes(size)
