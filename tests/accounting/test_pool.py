"""One pool for layers of several kinds: groups, pages and padding, worked out by hand."""

import pytest

from kvbook.accounting.gallery import gallery_model
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layers import (
    Kept,
    Layer,
    empty_layer,
    full_layer,
    recurrent_layer,
    window_layer,
)
from kvbook.accounting.need import CacheSize, cache_size
from kvbook.accounting.pool import pool_layout, spanned
from kvbook.errors import UnsupportedModelError

FULL = full_layer(2, 64, 64)  # 512 bytes per token at 16 bits
LOCAL = window_layer(100, 2, 64, 64)
STATE = recurrent_layer((Kept("recurrent state", 4, 1_000), Kept("convolution state", 100, 3)))


def toy(*layers: Layer, tokens: int = 1_000, **more: int) -> CacheSize:
    return cache_size(CacheGeometry("toy", layers), tokens, **more)


def test_one_kind_is_one_group() -> None:
    layout = pool_layout(toy(*[FULL] * 5))
    assert (layout.groups, layout.layers_per_group, layout.padding_layers) == (1, 5, 0)
    assert layout.block_bytes == 5 * 16 * 512
    assert layout.blocks(toy(*[FULL] * 5)) == 63  # 1,000 tokens in blocks of 16


def test_layers_that_keep_nothing_are_in_no_group() -> None:
    layout = pool_layout(toy(FULL, empty_layer(), FULL))
    assert (layout.groups, layout.layers_per_group) == (1, 2)


def test_widths_of_their_own_share_a_table_where_all_hold_the_same() -> None:
    layout = pool_layout(toy(FULL, full_layer(1, 64, 32)))
    assert (layout.groups, layout.padding_layers) == (1, 0)
    assert layout.block_bytes == 16 * (512 + 192)


def test_the_smallest_kind_sets_the_group() -> None:
    """2 full and 5 windowed layers: (2 full), (2), (2) and (1 + padding)."""
    layout = pool_layout(toy(FULL, FULL, *[LOCAL] * 5))
    assert (layout.groups, layout.layers_per_group, layout.padding_layers) == (4, 2, 1)
    assert layout.block_bytes == 2 * 16 * 512


def test_gemma_3_27b_pads_eight_layers() -> None:
    """10 full and 52 windowed: 1 + 6 groups of 10, and 8 of 70 layers hold nothing."""
    layout = pool_layout(cache_size(gallery_model("gemma-3-27b").geometry, 32_768))
    assert (layout.groups, layout.layers_per_group, layout.padding_layers) == (7, 10, 8)
    assert layout.block_bytes == 10 * 16 * 8_192


@pytest.mark.parametrize(("local", "in_group", "groups"), [(12, 12, 2), (17, 17, 2), (18, 12, 3)])
def test_kinds_of_about_the_same_number_are_padded_to_the_larger(
    local: int, in_group: int, groups: int
) -> None:
    """Below 1.5 times the smaller kind, the larger one sets the group."""
    layout = pool_layout(toy(*[FULL] * 12, *[LOCAL] * local))
    assert (layout.layers_per_group, layout.groups) == (in_group, groups)


def test_blocks_of_a_window_end_at_whole_blocks() -> None:
    """1,000 tokens, 100 of them visible: 900 … 999 lie in blocks 56 … 62."""
    size = toy(FULL, LOCAL)
    assert pool_layout(size).blocks(size) == 63 + 7


@pytest.mark.parametrize(
    ("tokens", "held", "blocks"),
    [(1, 1, 1), (16, 16, 1), (17, 17, 2), (32, 16, 1), (33, 16, 2), (48, 17, 2), (47, 17, 2),
     (100, 100, 7)],
)  # fmt: skip
def test_blocks_in_which_the_last_tokens_lie(tokens: int, held: int, blocks: int) -> None:
    assert spanned(tokens, held, 16) == blocks


def test_smaller_vectors_put_more_tokens_on_a_page() -> None:
    """Heads of half as many bytes: blocks of 32 tokens beside blocks of 16."""
    layout = pool_layout(toy(full_layer(1, 64, 64), LOCAL))
    assert sorted(kind.block_tokens for kind in layout.kinds) == [16, 32]
    assert layout.block_bytes == 16 * 512


def test_pages_that_cannot_be_made_equal_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"512 and of 384 bytes per token"):
        pool_layout(toy(full_layer(2, 64, 32), LOCAL))


def test_a_state_is_a_page() -> None:
    """4 · 1,000 numbers in 32 bits and 300 in 16: 16,600 B, so a page of 48 tokens, 24,576 B."""
    size = toy(FULL, STATE, STATE, STATE)
    layout = pool_layout(size)
    assert [kind.block_tokens for kind in layout.kinds] == [48, 48]
    assert (layout.groups, layout.block_bytes) == (4, 48 * 512)
    assert layout.blocks(size) == 21 + 3 * 2  # 1,000 tokens in blocks of 48; two blocks per state


def test_a_state_of_unknown_size_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="does not say how large a recurrent state is"):
        pool_layout(toy(FULL, recurrent_layer(None)))


@pytest.mark.parametrize("layers", [(empty_layer(),), (STATE,)])
def test_a_model_without_tokens_needs_no_pool(layers: tuple[Layer, ...]) -> None:
    with pytest.raises(UnsupportedModelError, match="toy keeps"):
        pool_layout(toy(*layers))


def test_the_tokens_that_are_logged_are_blocks_by_groups() -> None:
    layout = pool_layout(toy(FULL, LOCAL, LOCAL))
    assert layout.groups == 3
    assert layout.tokens(100) == 33 * 16
