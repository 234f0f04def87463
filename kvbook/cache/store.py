"""Slot to bytes: the tensors that hold keys and values.

Knows: layers, rows, heads, slots and widths. Does not know: positions, lengths, masks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

Index = tuple[Any, Any, Any]  # (rows, heads, slots), as PyTorch indexing takes it


class Layout(NamedTuple):
    """The part of a store's shape that comes from the model."""

    layers: int  # L
    kv_heads: int  # Hkv
    key_dim: int  # Dk
    value_dim: int  # Dv
    dtype: torch.dtype


class DenseStore:
    """Keys and values as they are, one tensor each: (L, rows, Hkv, slots, D).

    ``dtype`` is the element type, ``allocated_bytes`` the exact size of both tensors.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        slots: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = Layout(layers, heads, key_dim, value_dim, dtype)
        shape = (layers, rows, heads, slots)
        self.keys = torch.zeros(*shape, key_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, value_dim, dtype=dtype, device=device)
        # One view per layer, made once: indexing a layer costs nothing in the decode loop.
        self._key_layers, self._value_layers = self.keys.unbind(0), self.values.unbind(0)

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def slots(self) -> int:
        """Slots per row."""
        return self.keys.shape[3]

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of one row over all layers and heads."""
        layers, heads, key_dim, value_dim, dtype = self.layout
        return layers * heads * (key_dim + value_dim) * dtype.itemsize

    @property
    def allocated_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, where: Index, keys: Tensor, values: Tensor) -> None:
        self._key_layers[layer][where] = keys
        self._value_layers[layer][where] = values

    def read(self, layer: int, where: Index) -> tuple[Tensor, Tensor]:
        """Keys and values at ``where``: views of the storage when ``where`` is slices."""
        return self._key_layers[layer][where], self._value_layers[layer][where]

    def fill(self, row: int, start: int, stop: int, value: float) -> None:
        """Set slots start … stop-1 of one row, in every layer, to ``value``."""
        self.keys[:, row, :, start:stop] = value
        self.values[:, row, :, start:stop] = value

    def copy_rows(self, rows: list[int], slots: int) -> None:
        """Row i takes the first ``slots`` slots that row ``rows[i]`` had before the call."""
        source = torch.tensor(rows, device=self.device)
        for layer in (*self._key_layers, *self._value_layers):  # one layer at a time: small copies
            layer[: len(rows), :, :slots] = layer[source, :, :slots]
