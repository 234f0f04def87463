"""What one layer keeps of a token, and how far back it sees.

Knows: heads, widths, element type, window. Does not know: which layers are of this kind, where
anything is kept.
"""

from dataclasses import dataclass

import torch

from kvbook.cache.sizes import check_counts_from_zero, check_sizes


@dataclass(frozen=True)
class LayerKind:
    """Layers of one kind can share a group of a cache; others cannot.

    Raises ``ValueError`` for sizes that are no positive integers (``value_dim`` and ``sinks`` may
    be 0) and for a dtype that is no floating one.

    >>> LayerKind(kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16).bytes_per_token
    4096
    """

    kv_heads: int  # Hkv: heads that are stored
    key_dim: int  # Dk
    value_dim: int  # Dv: 0 where the keys serve as values too
    dtype: torch.dtype = torch.float32
    window: int | None = None  # W: keys visible to a query, itself included; None for all
    sinks: int = 0  # the first so many positions stay visible whatever the window

    def __post_init__(self) -> None:
        check_sizes(kv_heads=self.kv_heads, key_dim=self.key_dim)
        check_counts_from_zero(value_dim=self.value_dim, sinks=self.sinks)
        if self.window is not None:
            check_sizes(window=self.window)
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(
                f"dtype must be a floating type such as torch.bfloat16, got {self.dtype!r:.80}"
            )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one such layer, as it comes from the model."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize
