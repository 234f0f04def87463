"""Attention: queries over whatever view they are given.

Knows: heads, scale, the view's mask. Does not know: what kind of cache the view comes from, or
whether there is one.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbook.cache import View

Attend = Callable[[Tensor, View, float], Tensor]


def attend(queries: Tensor, view: View, scale: float) -> Tensor:
    """softmax(scale · Q Kᵀ, over visible keys) V: (B, H, T, Dk) to (B, H, T, Dv).

    Query head h reads KV head h // (H / Hkv). A query that sees no key gives zeros.
    """
    check_view(queries, view)
    B, H, T, D = queries.shape
    keys, values = view.read()
    if T == 1:
        # One query per head: the heads that share a KV head become rows of one product, so
        # each key and value is read once for all of them.
        Hkv = keys.shape[1]
        rows = queries.reshape(B, Hkv, H // Hkv, D)
        out = scaled_dot_product_attention(rows, keys, values, attn_mask=view.mask, scale=scale)
        return out.reshape(B, H, 1, -1)
    return scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=view.mask,
        is_causal=view.is_causal,
        scale=scale,
        enable_gqa=True,
    )


def check_view(queries: Tensor, view: View) -> None:
    """Raise ``ValueError`` unless these are queries (B, H, T, D) and a view to be read."""
    if not isinstance(queries, Tensor) or queries.ndim != 4 or not queries.is_floating_point():
        raise ValueError(f"queries must be a floating tensor (B, H, T, D), got {queries!r:.80}")
    if not hasattr(view, "read"):
        raise ValueError(f"view must be what a cache's update() returns, got {view!r:.80}")
