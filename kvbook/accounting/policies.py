"""What engines set aside for the same texts: one object per way to store a cache.

Knows: slots and blocks of each way, and which engine goes it. Does not know: how much memory there
is, how fast a way is.

Every count is of one device and the whole batch, and includes recurrent state where there is one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvbook.accounting.need import CacheSize, blocks_for, check_size
from kvbook.accounting.pool import pool_layout, spanned
from kvbook.accounting.units import check_text, check_tuple, quoted
from kvbook.errors import UnsupportedModelError

CELLS = 256  # llama.cpp pads its caches to so many cells
UBATCH = 512  # tokens of one micro-batch, llama.cpp's default


@dataclass(frozen=True)
class Policy:
    """A way to store a cache. ``who`` names engines with a year and the page that says so."""

    name: str
    rule: str
    who: tuple[str, ...]
    count: Callable[[CacheSize], int]

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_text("rule", self.rule)
        check_tuple("who", self.who, str)
        if not callable(self.count):
            raise ValueError(f"count must be a function of a size, got {quoted(self.count)}")

    def bytes(self, size: CacheSize) -> int:
        """Bytes set aside for ``size.batch`` sequences of ``size.tokens`` tokens.

        Raises ``UnsupportedModelError`` where an engine could not store the model this way.
        """
        check_size(size)
        return self.count(size)


def whole_text(size: CacheSize) -> int:
    """Whole blocks for all tokens in every layer, windows or not."""
    return size.reserved_bytes + state(size)


def rings(size: CacheSize) -> int:
    """A slot for each token of a full layer, and at most W slots for a windowed one."""
    return size.need_bytes + state(size)


def pool_per_kind(size: CacheSize) -> int:
    """Blocks of a pool that all kinds of layers share, padding included; a state is a block."""
    layout = pool_layout(size)
    return size.sequences * layout.blocks(size) * layout.block_bytes


def pool_per_layer(size: CacheSize) -> int:
    """Whole blocks of the tokens that a layer still needs, of each layer's own size."""
    step, total = size.block_size, 0
    for layer, layers in size.geometry.groups:
        written = size.slots_written(layer, size.tokens)
        held = size.slots_held(layer, size.tokens)
        total += layers * size.layer_bytes(layer, step * spanned(written, held, step))
    return size.sequences * total + state(size)


def cells(size: CacheSize) -> int:
    """Two runs of cells: the whole context for full layers, windows and a micro-batch for others.

    Cells are shared by all sequences of the batch and padded to 256.
    """
    total = 0
    for layer, layers in size.geometry.groups:
        context = padded(size.sequences * size.slots_written(layer, size.tokens))
        windows = size.sequences * (layer.window or 0) + UBATCH
        held = context if layer.window is None else padded(min(context, windows))
        total += layers * size.layer_bytes(layer, held)
    return total + state(size)


def padded(count: int) -> int:
    """So many cells, rounded up as llama.cpp does."""
    return blocks_for(count, CELLS) * CELLS


def state(size: CacheSize) -> int:
    """Recurrent state, which no policy can do without."""
    known = size.constant_state_bytes
    if known is None:
        raise UnsupportedModelError(
            f"the config of {size.geometry.name} does not say how large its recurrent state is"
        )
    return known


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(
            "whole text",
            "whole blocks for all tokens in every layer",
            (
                "vLLM with --disable-hybrid-kv-cache-manager (2025): "
                "https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager.html",
                "llama.cpp with --swa-full (2025): https://github.com/ggml-org/llama.cpp/pull/13194",
            ),
            whole_text,
        ),
        Policy(
            "ring",
            "a slot per token, and at most W slots in a windowed layer",
            (
                "transformers, StaticSlidingWindowLayer (2025): "
                "https://github.com/huggingface/transformers/blob/main/src/transformers/"
                "cache_utils.py",
                "mlx-lm, RotatingKVCache (2025): "
                "https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/models/cache.py",
            ),
            rings,
        ),
        Policy(
            "pool per kind",
            "blocks of one size for every kind of layer, with padding layers",
            (
                "vLLM, hybrid KV cache manager (2026): https://github.com/vllm-project/vllm/blob/"
                "001cabc1be16a59a70d720ed61a13b678c060a18/vllm/v1/core/kv_cache_utils.py",
            ),
            pool_per_kind,
        ),
        Policy(
            "pool per layer",
            "whole blocks of what each layer still needs, of the layer's own size",
            (
                "SGLang, SWAKVPool (2026): https://github.com/sgl-project/sglang/blob/main/python/"
                "sglang/srt/mem_cache/swa_memory_pool.py",
            ),
            pool_per_layer,
        ),
        Policy(
            "cells",
            "the context for full layers, windows and a micro-batch of 512 for the others",
            (
                "llama.cpp, llama_kv_cache_iswa (2025): "
                "https://github.com/ggml-org/llama.cpp/blob/master/src/llama-kv-cache-iswa.cpp",
            ),
            cells,
        ),
    )
}
