"""Looking inside a forward pass.

Knows: where the residual stream passes between layers. Does not know: what to conclude from it.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

from kvbook.cache import KVCache
from kvbook.model.transformer import Transformer


def hidden_states(
    model: Transformer, tokens: Tensor, cache: KVCache | None = None
) -> list[Tensor]:
    """The residual stream before layer 0 and after each layer: L + 1 tensors (B, T, C).

    Runs one forward pass of ``tokens`` (B, T); a ``cache`` is used and filled as usual.
    """
    B, T = tokens.shape
    states: list[Tensor] = []

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        states.append(inputs[0].view(B, T, -1))

    def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        states.append(output.view(B, T, -1))

    hooks = [model.blocks[0].register_forward_pre_hook(before)]
    hooks += [block.register_forward_hook(after) for block in model.blocks]
    try:
        model(tokens, cache)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def logits_in_pieces(
    model: Transformer, tokens: Tensor, cuts: Iterable[int], cache: KVCache | None = None
) -> Tensor:
    """Logits at every position of one text, (T, V), that is fed in pieces.

    ``tokens`` (T,) is cut before each position in ``cuts``, which ascend. A ``cache`` of one row
    is continued; without one the pieces go through a new cache that keeps everything.
    """
    cache = model.new_cache(1, len(tokens)) if cache is None else cache
    edges = [0, *cuts, len(tokens)]
    return torch.cat([model(tokens[None, a:b], cache)[0] for a, b in pairwise(edges)])


def cached_entries(model: Transformer, tokens: Tensor) -> Tensor:
    """What a cache holds after one pass of ``tokens`` (T,): keys and values, (L, 2, Hkv, T, D)."""
    kind = model.layer_kinds[0]
    if kind.key_dim != kind.value_dim:
        raise ValueError(
            f"keys of width {kind.key_dim} and values of width {kind.value_dim} do not go into "
            "one tensor; ask cache.entries(layer) for each layer"
        )
    cache = model.new_cache(1, len(tokens))
    model(tokens[None], cache)
    return torch.stack(
        [torch.stack(cache.entries(layer)) for layer in range(model.config.n_layers)]
    )
