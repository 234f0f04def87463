"""What attention is given, and the one rule of who sees whom.

Knows: positions. Does not know: where keys are kept, how they are stored, what a layer computes.
"""

from dataclasses import dataclass

from torch import Tensor

NOT_A_TOKEN = -1  # the position of padding: such a key is seen by no query


@dataclass(frozen=True)
class KVView:
    """The keys and values that one layer reads in one call.

    ``mask`` and ``is_causal`` are what ``visible`` says for this call, in the form that
    PyTorch's ``scaled_dot_product_attention`` takes: both empty when every key is visible to
    every query, ``is_causal`` when queries and keys are the same tokens, a mask otherwise.
    """

    keys: Tensor  # (B, Hkv, S, Dk), already rotated
    values: Tensor  # (B, Hkv, S, Dv)
    positions: Tensor  # (1 or B, S) int64, NOT_A_TOKEN where a slot holds none
    mask: Tensor | None = None  # bool (1 or B, 1, T, S), True where visible
    is_causal: bool = False


def visible(queries: Tensor, keys: Tensor, window: int | None = None) -> Tensor:
    """Which keys each query may see, from positions alone: bool (B, T, S).

    ``queries`` (B, T) and ``keys`` (B, S) are int64 positions. A key is visible if it is a
    token, if it is not in the query's future, and if it is among the last ``window`` positions
    up to and including the query's own.

    >>> import torch
    >>> visible(torch.tensor([[3, 4]]), torch.arange(5)[None]).int().tolist()
    [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]
    """
    query, key = queries[:, :, None], keys[:, None, :]
    seen = (key >= 0) & (key <= query)
    if window is not None:
        seen &= key > query - window
    return seen
