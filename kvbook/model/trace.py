"""Looking inside a forward pass.

Knows: where the residual stream passes between layers. Does not know: what to conclude from it.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

from kvbook.cache import KVCache
from kvbook.cache.sizes import check_class
from kvbook.model.transformer import Transformer, check_shape


def hidden_states(
    model: Transformer, tokens: Tensor, cache: KVCache | None = None
) -> list[Tensor]:
    """The residual stream before layer 0 and after each layer: L + 1 tensors (B, T, C).

    Runs one forward pass of ``tokens`` (B, T); a ``cache`` is used and filled as usual.
    """
    check_class("model", model, Transformer, "load_smollm2() or Transformer(config)")
    check_shape(tokens)
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
    _check_text(model, tokens)
    edges = [0, *cuts, len(tokens)]
    if not all(type(a) is type(b) is int and a < b for a, b in pairwise(edges)):
        raise ValueError(
            f"cuts must ascend and lie inside of the {len(tokens)} tokens, got {cuts!r:.80}"
        )
    cache = model.new_cache(1, len(tokens)) if cache is None else cache
    return torch.cat([model(tokens[None, a:b], cache)[0] for a, b in pairwise(edges)])


def cached_entries(model: Transformer, tokens: Tensor) -> Tensor:
    """What a cache holds after one pass of ``tokens`` (T,): keys and values, (L, 2, Hkv, T, D)."""
    _check_text(model, tokens)
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


def _check_text(model: Transformer, tokens: Tensor) -> None:
    """Raise ``ValueError`` unless these are a model and one line of tokens, (T,)."""
    check_class("model", model, Transformer, "load_smollm2() or Transformer(config)")
    if not isinstance(tokens, Tensor) or tokens.ndim != 1:
        raise ValueError(f"tokens must be a tensor of one line, (T,), got {tokens!r:.80}")
    check_shape(tokens[None])
