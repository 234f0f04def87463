"""One pool of equal blocks for layers of several kinds, as vLLM's hybrid manager lays it out.

Knows: how layers are grouped, padding layers, the common page, blocks of one sequence. Does not
know: other ways to store a cache, how much memory there is.

Layers of one kind (the same vectors, the same window) are split into groups of equally many
layers, and a block holds one page for each layer of a group, whichever group takes it. So pages
must be equally large: kinds with smaller vectors put more tokens on a page, and a recurrent state
is a page of its own, for which attention's pages are made large enough. A group that lacks layers
is filled up with padding, which takes memory and holds nothing.

Source: ``_get_kv_cache_groups_uniform_page_size`` and ``unify_kv_cache_spec_page_size`` in
https://github.com/vllm-project/vllm/blob/001cabc1be16a59a70d720ed61a13b678c060a18/vllm/v1/core/kv_cache_utils.py
(2026).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbook.accounting.formats import bytes_of
from kvbook.accounting.layers import Kept, Layer
from kvbook.accounting.need import CacheSize, blocks_for, check_size, share
from kvbook.accounting.units import check_count
from kvbook.errors import UnsupportedModelError

CLOSE = 1.5  # kinds with fewer than so many times the layers of the smallest share its group size
STATE_BLOCKS = 2  # the running state and the one at the last whole block, for prefix reuse
STATE_BITS = {"recurrent state": 32, "convolution state": 16}  # as the engine stores them


@dataclass(frozen=True)
class Kind:
    """Layers that one block table can serve: ``groups`` groups, pages of ``block_tokens``."""

    layer: Layer
    layers: int
    groups: int
    block_tokens: int

    def blocks(self, size: CacheSize) -> int:
        """Blocks that one sequence of ``size.tokens`` tokens holds in all groups of this kind."""
        if self.layer.kind == "recurrent":
            return self.groups * STATE_BLOCKS
        written = size.slots_written(self.layer, size.tokens)
        held = size.slots_held(self.layer, size.tokens)
        return self.groups * spanned(written, held, self.block_tokens)


@dataclass(frozen=True)
class PoolLayout:
    """How a pool serves all layers: blocks of ``block_bytes`` for any group of any kind."""

    kinds: tuple[Kind, ...]
    layers_per_group: int
    block_bytes: int

    @property
    def groups(self) -> int:
        return sum(kind.groups for kind in self.kinds)

    @property
    def padding_layers(self) -> int:
        """Layers that take memory and hold nothing."""
        return self.groups * self.layers_per_group - sum(kind.layers for kind in self.kinds)

    def blocks(self, size: CacheSize) -> int:
        """Blocks that one sequence holds."""
        check_size(size)
        return sum(kind.blocks(size) for kind in self.kinds)

    def tokens(self, blocks: int) -> int:
        """What the engine logs as "GPU KV cache size" for so many blocks."""
        check_count("blocks", blocks, 0)
        return blocks // self.groups * min(kind.block_tokens for kind in self.kinds)


def pool_layout(size: CacheSize) -> PoolLayout:
    """The layout for the model of ``size``, on one device, with blocks of ``size.block_size``.

    Raises ``UnsupportedModelError`` where pages cannot be made equal, where the size of a
    recurrent state is not known, and for a model that keeps nothing.

    Example: 62 layers, 10 of them full and 52 windowed, make 1 + 6 groups of 10 layers, the last
    with 8 padding layers.
    """
    check_size(size)
    counted = Counter(kept for kept in map(stored, size.geometry.layers) if kept is not None)
    kinds = list(counted.items())
    if not kinds:
        raise UnsupportedModelError(f"{size.geometry.name} keeps nothing, so it needs no pool")
    attention = [layer for layer, _ in kinds if layer.kind != "recurrent"]
    holding = {(layer.window, layer.source_tokens) for layer in attention}
    if len(holding) == 1 and len(attention) == len(kinds):
        return one_group(size, kinds)
    block_tokens, page_bytes = common_page(size, [layer for layer, _ in kinds])
    fewest, most = min(counted.values()), max(counted.values())
    in_group = most if most < CLOSE * fewest else fewest
    made = tuple(
        Kind(layer, layers, share(layers, in_group), tokens)
        for (layer, layers), tokens in zip(kinds, block_tokens, strict=True)
    )
    return PoolLayout(made, in_group, in_group * page_bytes)


def stored(layer: Layer) -> Layer | None:
    """The layer as its storage sees it: without what its latents could be expanded to."""
    if not layer.per_token and layer.state == ():
        return None
    if layer.every > 1:
        raise UnsupportedModelError(
            f"{layer.every} tokens share an entry of a compressed history, which engines keep in "
            "layouts of their own; a pool of equal pages is not counted here"
        )
    return replace(
        layer, kind="full" if layer.per_token else "recurrent", expanded=(), stored_once=()
    )


def one_group(size: CacheSize, kinds: Sequence[tuple[Layer, int]]) -> PoolLayout:
    """All layers hold the same tokens: one block table, and a page per layer of its own size."""
    layers = sum(count for _, count in kinds)
    page = sum(count * size.layer_bytes(layer, size.block_size) for layer, count in kinds)
    return PoolLayout((Kind(kinds[0][0], layers, 1, size.block_size),), layers, page)


def common_page(size: CacheSize, layers: Sequence[Layer]) -> tuple[list[int], int]:
    """Tokens on a page of each layer, and the bytes of a page, which are the same for all."""
    per_token = [size.layer_bytes(layer, 1) for layer in layers if layer.per_token]
    states = [state_bytes(size, layer) for layer in layers if layer.kind == "recurrent"]
    widest = max(per_token, default=0)
    if widest == 0:
        raise UnsupportedModelError(
            f"{size.geometry.name} keeps states only; a pool of pages is made for tokens"
        )
    largest = max(states, default=0)
    tokens = size.block_size * max(1, blocks_for(largest, size.block_size * widest))
    page = tokens * widest
    for each in per_token:
        if page % each:
            raise UnsupportedModelError(
                f"{size.geometry.name} has layers of {widest:,} and of {each:,} bytes per token; "
                "pages of one size are not possible, as one does not divide the other"
            )
    return [
        page // size.layer_bytes(layer, 1) if layer.per_token else tokens for layer in layers
    ], page


def state_bytes(size: CacheSize, layer: Layer) -> int:
    """The state of a recurrent layer on one device, in the engine's own types."""
    if layer.state is None:
        raise UnsupportedModelError(
            f"the config of {size.geometry.name} does not say how large a recurrent state is"
        )
    return sum(
        bytes_of(numbers(kept, size.devices) * STATE_BITS.get(kept.name, 32))
        for kept in layer.state
    )


def numbers(kept: Kept, devices: int) -> int:
    return kept.heads_per_device(devices) * kept.width


def spanned(tokens: int, held: int, block_tokens: int) -> int:
    """Blocks in which the last ``held`` of ``tokens`` tokens lie.

    >>> spanned(tokens=100, held=20, block_tokens=16)  # tokens 80 … 99 of blocks 5 and 6
    2
    """
    return blocks_for(tokens, block_tokens) - (tokens - held) // block_tokens
