"""Slot to bytes: the tensors that hold keys and values.

Knows: layers, rows, heads, slots and widths. Does not know: positions, lengths, masks.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from kvbook.cache.layer_kind import LayerKind
from kvbook.cache.sizes import check_sizes

Where = tuple[Any, Any]  # (rows, slots), as PyTorch indexing takes it


class NewStore(Protocol):
    """Makes a store: a class below, ``quantized(…)``, or anything called like one."""

    def __call__(
        self,
        kind: LayerKind,
        layers: int,
        rows: int,
        slots: int,
        device: torch.device | str = "cpu",
    ) -> "Store": ...


class Store:
    """Base of stores: ``slots`` for each of ``rows``, in each of ``layers`` of one kind.

    A new store allocates its tensors and fills in the methods that raise here. Keys and values
    come and go token first: (…, Hkv, D), in the type of ``kind.dtype``.
    """

    write_size = 1  # tokens that can only be written together: from a multiple of their number

    def __init__(
        self,
        kind: LayerKind,
        layers: int,
        rows: int,
        slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        check_sizes(layers=layers, rows=rows, slots=slots)
        self.kind, self.layers, self.rows, self.slots = kind, layers, rows, slots
        self.device = usable_device(device)

    @property
    def tensors(self) -> list[Tensor]:
        """The storage itself."""
        raise NotImplementedError

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storage, used or not."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of one row over all layers and heads."""
        return self.allocated_bytes // (self.rows * self.slots)

    def write(self, layer: int, where: Where, keys: Tensor, values: Tensor) -> None:
        """Keep the keys and values of some slots of one layer."""
        raise NotImplementedError

    def read(self, layer: int, where: Where) -> tuple[Tensor, Tensor]:
        """Keys and values at ``where``."""
        raise NotImplementedError

    def round_trip(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What reading would give, had these been written. By default the same: nothing is lost."""
        return keys, values

    def fill(self, row: int, start: int, stop: int, value: float) -> None:
        """Let slots start … stop-1 of one row, in every layer, read as ``value``."""
        raise NotImplementedError

    def copy_rows(self, rows: list[int], slots: int) -> None:
        """Row i takes the first ``slots`` slots that row ``rows[i]`` had before the call."""
        raise NotImplementedError

    def copy_slots(self, row: int, source: list[int], target: list[int]) -> None:
        """Inside one row, slot ``target[i]`` takes what slot ``source[i]`` holds."""
        raise NotImplementedError


def usable_device(device: torch.device | str) -> torch.device:
    """The device, with its number. ``ValueError`` if there is no such device here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device {device!r} cannot be used here ({reason}); allowed are 'cpu' and the "
            "devices that this build of PyTorch finds"
        ) from error


def take(layer: Tensor, where: Where) -> Tensor:
    """``layer[where]`` for (rows, slots, Hkv, D): a view for slices, a gather for slot tensors."""
    row, slots = where
    if isinstance(row, int):  # many times faster than indexing with a number and a tensor
        flat = layer[row].index_select(0, slots.reshape(-1))
        return flat.view(*slots.shape, *layer.shape[2:])
    return layer[where]


class DenseStore(Store):
    """Keys and values as they are, one tensor each: (L, rows, Hkv, slots, D)."""

    @torch.inference_mode(False)  # or they could not be written to outside of it
    def __init__(
        self,
        kind: LayerKind,
        layers: int,
        rows: int,
        slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(kind, layers, rows, slots, device)
        shape = (layers, rows, kind.kv_heads, slots)
        self.keys = self._zeros((*shape, kind.key_dim), kind.dtype, device)
        self.values = self._zeros((*shape, kind.value_dim), kind.dtype, device)
        self._see_layers()

    def _see_layers(self) -> None:
        # One token-first view per layer, (rows, slots, Hkv, D), made once: indexing a layer
        # costs nothing in the decode loop.
        self._key_layers = self.keys.transpose(2, 3).unbind(0)
        self._value_layers = self.values.transpose(2, 3).unbind(0)

    def __getstate__(self) -> dict[str, Any]:
        views = {"_key_layers", "_value_layers"}  # views of a copy are made anew, or they are none
        return {name: value for name, value in vars(self).items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._see_layers()

    def _zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """One head's keys lie side by side in memory: what a product over all of them likes."""
        return torch.zeros(shape, dtype=dtype, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """The storage itself."""
        return [self.keys, self.values]

    def write(self, layer: int, where: Where, keys: Tensor, values: Tensor) -> None:
        self._key_layers[layer][where] = keys
        self._value_layers[layer][where] = values

    def read(self, layer: int, where: Where) -> tuple[Tensor, Tensor]:
        """Keys and values at ``where``: views of the storage when ``where`` is slices."""
        return take(self._key_layers[layer], where), take(self._value_layers[layer], where)

    def fill(self, row: int, start: int, stop: int, value: float) -> None:
        """Set slots start … stop-1 of one row, in every layer, to ``value``."""
        self.keys[:, row, :, start:stop] = value
        self.values[:, row, :, start:stop] = value

    def copy_rows(self, rows: list[int], slots: int) -> None:
        """Row i takes the first ``slots`` slots that row ``rows[i]`` had before the call."""
        source = torch.tensor(rows, device=self.device)
        for layer in (*self._key_layers, *self._value_layers):  # one layer at a time: small copies
            layer[: len(rows), :slots] = layer[source, :slots]

    def copy_slots(self, row: int, source: list[int], target: list[int]) -> None:
        """Inside one row, slot ``target[i]`` takes what slot ``source[i]`` holds."""
        for tensor in (self.keys, self.values):
            tensor[:, row, :, target] = tensor[:, row, :, source]


class SlotMajorStore(DenseStore):
    """A DenseStore in which the heads of one token lie side by side in memory.

    A gather by slots then copies one run per token. On the CPU this was written on, a gather of
    4,096 tokens took a fifth of the time.
    """

    def _zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        layers, rows, heads, slots, width = shape
        return torch.zeros(layers, rows, slots, heads, width, dtype=dtype, device=device).transpose(
            2, 3
        )
