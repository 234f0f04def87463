"""Questions that have exact answers: who depends on whom, and who sees whom.

Knows: functions of rows, views. Does not know: models, what the answer should be.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbook.cache import KVView, View
from kvbook.cache.sizes import check_sizes
from kvbook.model.attention import Attend, attend


def dependencies(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Which output rows change when one input row changes: bool (T_out, T_in).

    ``rows`` is (T_in, …). Row j is replaced by other values, everything else stays, and the
    outputs are compared bit for bit. The shape never changes, so no kernel has a reason to sum
    in another order: False means that not one bit moved.

    True shows a dependence. False shows none for this input and this change; that there is none
    for any input is for an argument to say.
    """
    if not isinstance(rows, Tensor) or not rows.numel():
        raise ValueError(f"rows must be a tensor (T, …) that is not empty, got {rows!r:.80}")
    rows = rows.contiguous()
    generator = torch.Generator().manual_seed(0)
    before = function(rows)
    if not isinstance(before, Tensor) or not before.ndim:
        raise ValueError(f"function must give a tensor (T, …), got {before!r:.80}")
    columns = []
    for j in range(len(rows)):
        changed = rows.clone()
        # Another value that is valid as well: a float row is drawn anew, a token id flips a bit.
        changed[j] = (
            torch.randn(rows[j].shape, generator=generator, dtype=rows.dtype)
            if rows.is_floating_point()
            else changed[j] ^ 1
        )
        columns.append((function(changed) != before).flatten(1).any(1))
    return torch.stack(columns, 1)


def visibility(view: View, heads: int, T: int, attend: Attend = attend) -> Tensor:
    """The weights that ``attend`` gives when no key is preferred: (B, heads, T, S).

    Queries are zero and values are the identity, so row i is 1/n on exactly the n positions that
    query i may see, and 0 elsewhere. Raises ``ValueError`` for ``heads`` that are no multiple of
    the view's KV heads.
    """
    check_sizes(heads=heads, T=T)
    if not hasattr(view, "read"):
        raise ValueError(f"view must be what a cache's update() returns, got {view!r:.80}")
    keys, _ = view.read()
    B, Hkv, S, D = keys.shape
    if heads % Hkv:
        raise ValueError(
            f"heads must be a multiple of the {Hkv} KV heads of the view, got {heads}: each KV "
            "head serves the same number of query heads"
        )
    eye = torch.eye(S, dtype=keys.dtype, device=keys.device).expand(B, Hkv, S, S)
    by_position = KVView(keys, eye, view.positions, view.mask, view.is_causal)
    return attend(keys.new_zeros(B, heads, T, D), by_position, 1.0)
