"""What one layer keeps of a token, and how far back it sees.

Knows: heads, widths, element type, window. Does not know: which layers are of this kind, where
anything is kept.
"""

from typing import NamedTuple

import torch


class LayerKind(NamedTuple):
    """Layers of one kind can share a group of a cache; others cannot.

    >>> LayerKind(kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16).bytes_per_token
    4096
    """

    kv_heads: int  # Hkv: heads that are stored
    key_dim: int  # Dk
    value_dim: int  # Dv: 0 where the keys serve as values too
    dtype: torch.dtype = torch.float32
    window: int | None = None  # W: keys visible to a query, itself included; None for all
    sinks: int = 0  # the first so many positions stay visible whatever the window

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one such layer, as it comes from the model."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize
