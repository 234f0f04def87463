"""Attention that chooses its tokens: index keys beside the others, and compressed histories.

Knows: which layers have an indexer, and what DeepSeek-V4 keeps. Does not know: how tokens are
chosen, bytes.
"""

from kvbook.accounting.layer_kinds import CSA, INDEXED, WINDOW
from kvbook.accounting.layers import Kept, Layer, compressed_layer, recurrent_layer
from kvbook.config.family_defaults import family
from kvbook.config.spellings import (
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    Fields,
    check_length,
    count,
    optional_count,
)
from kvbook.config.spellings import WINDOW as WINDOW_NAMES
from kvbook.errors import UnsupportedModelError

Caches = tuple[Layer, ...]

WIDTH_OF_INDEX = ("index_head_dim", "sparse_index_dim", "indexer_head_dim")
LETTERS = {"F": "full", "S": "shared"}
# Classes that index only the layers that are named so, though they state a width for all.
NAMED_ONLY = ("minimax_m3_vl_text",)


def with_index_keys(fields: Fields, kinds: list[str], layers: list[Caches]) -> list[Caches]:
    """Sparse attention chooses tokens by keys of its own (DeepSeek-V3.2): one more vector each.

    A layer that takes its neighbor's choice has no keys for it.
    """
    nested = fields.object("sparse_attention_config")  # MiniMax-M3
    where = fields if nested is None else nested
    marks = indexer_marks(fields, nested, kinds)
    if nested is not None:
        nested.idle(
            "sparse_num_index_heads", "sparse_block_size", "sparse_topk_blocks",
            "sparse_local_block", "sparse_init_block", "use_sparse_attention",
            "sparse_score_type", "sparse_disable_index_value",
        )  # fmt: skip
    width = optional_count(where, *WIDTH_OF_INDEX)
    if width is None:
        width = optional_count(fields, *WIDTH_OF_INDEX)
    fields.idle(*WIDTH_OF_INDEX)
    if width is None or not any(marks):
        if INDEXED in kinds:
            count(fields, "index_head_dim")
        return layers
    return [
        (caches[0].with_index_keys(width), *caches[1:]) if mark and caches[0].per_token else caches
        for caches, mark in zip(layers, marks, strict=True)
    ]


def indexer_marks(fields: Fields, nested: Fields | None, kinds: list[str]) -> list[bool]:
    """For each layer, whether it keeps index keys."""
    layers = len(kinds)
    frequency = None if nested is None else nested.get("sparse_attention_freq")
    if frequency is not None:
        check_length("sparse_attention_freq", frequency, layers)
        return [bool(mark) for mark in frequency]
    if INDEXED in kinds:
        indexed = [kind == INDEXED for kind in kinds]
    else:
        indexed = [family(fields) not in NAMED_ONLY] * layers
    own = own_choices(fields, layers)
    return [a and b for a, b in zip(indexed, own, strict=True)]


def own_choices(fields: Fields, layers: int) -> list[bool]:
    """Whether a layer chooses for itself: by name, by letter, or every so many layers."""
    named = fields.get("indexer_types")
    letters = fields.get("index_topk_pattern")
    every = optional_count(fields, "index_topk_freq")
    offset = optional_count(fields, "index_skip_topk_offset", low=0)
    if named:
        check_length("indexer_types", named, layers)
        known(named, ("full", "shared"), "indexer_types")
        return [mark == "full" for mark in named]
    if letters:
        check_length("index_topk_pattern", letters, layers)
        known(letters, (*LETTERS, "full", "shared"), "index_topk_pattern")
        return [LETTERS.get(mark, mark) == "full" for mark in letters]
    if family(fields) == "hy_v4":
        return [i == 0 or (i - 1) % 4 == 0 for i in range(layers)]
    if every is None or every == 1:
        return [True] * layers
    first = 2 if offset is None else offset
    return [max(i - first + 1, 0) % every == 0 for i in range(layers)]


def known(marks: list[str] | str, words: tuple[str, ...], name: str) -> None:
    for mark in marks:
        if mark not in words:
            raise UnsupportedModelError(
                f"{name} has {mark!r:.40}, which is not counted here; known: {', '.join(words)}"
            )


# ---- DeepSeek-V4


def compressed_layers(fields: Fields, kinds: list[str]) -> list[Caches]:
    """A window of keys that are also values and, in most layers, a compressed history.

    One vector serves as key and value. Beside it a layer keeps one entry per so many tokens, a
    layer with an indexer one index key per entry too, and the tokens since the last entry.
    """
    heads = optional_count(fields, *KV_HEADS) or 1
    if heads != 1 or set(kinds) - {CSA, "hca", WINDOW}:
        raise UnsupportedModelError(
            f"compressed histories with {heads} KV heads, or beside other kinds of layers, are not "
            "counted here; known: one KV head in windowed and compressed layers (DeepSeek-V4)"
        )
    fields.idle(*HEADS, "qk_rope_head_dim")
    width, index_width = count(fields, *HEAD_WIDTH), optional_count(fields, "index_head_dim")
    near = Layer("window", (Kept("keys", 1, width),), window=count(fields, *WINDOW_NAMES))
    rates = compression_rates(fields)
    made: dict[str, Caches] = {WINDOW: (near,)}
    for kind in set(kinds) - {WINDOW}:
        index = None
        if kind == CSA:
            index = index_width or count(fields, "index_head_dim")
        every = rates[kind]
        state = open_entries(every, width, index)
        made[kind] = (near, compressed_layer(every, width, index), recurrent_layer(state))
    return [made[kind] for kind in kinds]


def compression_rates(fields: Fields) -> dict[str, int]:
    """Tokens per entry of each kind of layer."""
    stated = fields.object("compress_rates")
    rates = {}
    for kind, name, older, default in (
        (CSA, "compressed_sparse_attention", "compress_rate_csa", 4),
        ("hca", "heavily_compressed_attention", "compress_rate_hca", 128),
    ):
        own = None if stated is None else optional_count(stated, name)
        rates[kind] = own or optional_count(fields, older) or default
    return rates


def open_entries(every: int, width: int, index_width: int | None) -> tuple[Kept, ...]:
    """Tokens that wait for their entry: a vector and its gate each, at most ``every`` − 1.

    With an indexer, entries overlap: both halves of twice the width wait, and of the last whole
    entry one half is kept.
    """
    if index_width is None:
        return (Kept("open entries", 2 * (every - 1), width),) if every > 1 else ()
    both = width + index_width
    waiting = (Kept("open entries", 2 * (every - 1), 2 * both),) if every > 1 else ()
    return (*waiting, Kept("overlap of entries", 2 * every, both))
