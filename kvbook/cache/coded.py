"""Slot to bytes, in fewer bytes: a store that keeps codes and scales.

Knows: layers, rows, slots, which slots share a scale. Does not know: how a codec turns vectors
into codes, positions, lengths, masks.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbook.cache.codec import Codec, Encoded
from kvbook.cache.layer_kind import LayerKind
from kvbook.cache.store import NewStore, Store, Where


class CodedStore(Store):
    """Keys and values as codes. ``kind.dtype`` is the type of what is written and read.

    Where a codec's group spans several tokens, a write, ``fill`` or ``copy_slots`` covers whole
    groups: as many consecutive slots, from a multiple of their number. Reads take any slots.
    Raises ``ValueError`` if groups do not divide the widths or the slots.
    """

    @torch.inference_mode(False)  # or they could not be written to outside of it
    def __init__(
        self,
        kind: LayerKind,
        layers: int,
        rows: int,
        slots: int,
        device: torch.device | str = "cpu",
        *,
        keys: Codec,
        values: Codec,
    ) -> None:
        few, many = sorted((keys.group[0], values.group[0]))
        if many % few:
            raise ValueError(
                f"groups of {keys.group[0]} tokens for keys and {values.group[0]} for values do "
                "not nest; let one be a multiple of the other"
            )
        super().__init__(kind, layers, rows, slots, device)
        self.write_size = many
        shape = (layers, rows, slots, kind.kv_heads)
        self.keys = CodedTensor(keys, shape, kind.key_dim, kind.dtype, self.device)
        self.values = CodedTensor(values, shape, kind.value_dim, kind.dtype, self.device)
        self._parts = (self.keys, self.values)

    @property
    def tensors(self) -> list[Tensor]:
        """The storage itself: codes, scales and offsets of keys, then of values."""
        return [*self.keys.held, *self.values.held]

    def write(self, layer: int, where: Where, keys: Tensor, values: Tensor) -> None:
        groups = [part.groups_at(where) for part in self._parts]
        encoded = [part.encode(x) for part, x in zip(self._parts, (keys, values), strict=True)]
        for part, at, new in zip(self._parts, groups, encoded, strict=True):
            part.codes[layer][where] = new.codes
            part.scales[layer][at] = new.scales
            part.offsets[layer][at] = new.offsets

    def read(self, layer: int, where: Where) -> tuple[Tensor, Tensor]:
        """Keys and values at ``where``, decoded: new tensors, whatever ``where`` is."""
        return self.keys.read(layer, where), self.values.read(layer, where)

    def round_trip(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What reading would give, had these whole groups been written."""
        return self.keys.round_trip(keys), self.values.round_trip(values)

    def fill(self, row: int, start: int, stop: int, value: float) -> None:
        """Let slots start … stop-1 of one row, in every layer, read as ``value``.

        Zero and not-a-number come back as they are, others as the codecs have it.
        """
        where = (row, slice(start, stop))
        groups = [part.groups_at(where) for part in self._parts]
        for part, at in zip(self._parts, groups, strict=True):
            codes, scales, offsets = part.constant(value)
            part.held.codes[:, row, start:stop] = codes[:1]
            part.held.scales[:, *at] = scales
            part.held.offsets[:, *at] = offsets

    def copy_rows(self, rows: list[int], slots: int) -> None:
        """Row i takes the first ``slots`` slots that row ``rows[i]`` had before the call.

        Where slots share scales, the rest of the last group comes along.
        """
        source = torch.tensor(rows, device=self.device)
        groups = -(-slots // self.write_size)
        for part in self._parts:
            for layer in (*part.codes, *part.scales, *part.offsets):
                stop = groups * self.write_size * layer.shape[1] // self.slots
                layer[: len(rows), :stop] = layer[source, :stop]

    def copy_slots(self, row: int, source: list[int], target: list[int]) -> None:
        """Inside one row, slot ``target[i]`` takes what slot ``source[i]`` holds."""
        old, new = (torch.tensor(x, device=self.device, dtype=torch.long) for x in (source, target))
        groups = [(part.groups_at((row, old)), part.groups_at((row, new))) for part in self._parts]
        for part, ((_, old_groups), (_, new_groups)) in zip(self._parts, groups, strict=True):
            codes, scales, offsets = part.held
            codes[:, row, new] = codes[:, row, old]
            scales[:, row, new_groups] = scales[:, row, old_groups]
            offsets[:, row, new_groups] = offsets[:, row, old_groups]


class CodedTensor:
    """The keys or the values of a store: codes (L, rows, slots, heads, bytes of a vector).

    ``shape`` is (layers, rows, slots, heads), ``width`` the elements of a vector.
    """

    def __init__(
        self,
        codec: Codec,
        shape: tuple[int, int, int, int],
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        layers, rows, slots, heads = shape
        self.codec, self.slots, self.tokens, self.dtype = codec, slots, codec.group[0], dtype
        if slots % self.tokens:
            raise ValueError(
                f"groups of {self.tokens} tokens do not divide {slots} slots; use a multiple of "
                f"{self.tokens} slots"
            )
        self.shape, self.device = (self.tokens, heads, width), device
        # What encoding one group gives says it all: shapes, types, and that the widths fit.
        one = self.constant(0.0)
        lines = (slots, slots // self.tokens, slots // self.tokens)
        self.held = Encoded(
            *(piece.new_zeros(layers, rows, n, *piece.shape[1:])
              for piece, n in zip(one, lines, strict=True))
        )  # fmt: skip
        self._see_layers()

    def _see_layers(self) -> None:
        # One view per layer, made once: indexing a layer costs nothing in the decode loop.
        self.codes, self.scales, self.offsets = (piece.unbind(0) for piece in self.held)

    def __getstate__(self) -> dict[str, Any]:
        views = {"codes", "scales", "offsets"}  # views of a copy are made anew, or they are none
        return {name: value for name, value in vars(self).items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._see_layers()

    def constant(self, value: float) -> Encoded:
        """One group of the same number throughout."""
        number = torch.tensor(value, dtype=torch.float64).to(self.dtype)
        return self.encode(number.to(self.device).expand(self.shape))

    def encode(self, x: Tensor) -> Encoded:
        return self.codec.encode(x.to(self.dtype))

    def round_trip(self, x: Tensor) -> Tensor:
        return self.codec.round_trip(x.to(self.dtype))

    def read(self, layer: int, where: Where) -> Tensor:
        rows, slots = where
        codes, scales, offsets = self.codes[layer], self.scales[layer], self.offsets[layer]
        if not isinstance(slots, slice):
            at = (rows, slots // self.tokens)
            return self.codec.decode(Encoded(codes[where], scales[at], offsets[at]), self.dtype)
        start, stop, _ = slots.indices(self.slots)
        first, last = start // self.tokens, -(-stop // self.tokens)
        begin, end = first * self.tokens, last * self.tokens
        groups = Encoded(
            codes[rows, begin:end], scales[rows, first:last], offsets[rows, first:last]
        )
        return self.codec.decode(groups, self.dtype)[..., start - begin : stop - begin, :, :]

    def groups_at(self, where: Where) -> Where:
        """(rows, groups) of (rows, slots). Raises ``ValueError`` unless these are whole groups."""
        rows, slots = where
        if self.tokens == 1:
            return where
        if isinstance(slots, slice):
            start, stop, _ = slots.indices(self.slots)
            if start % self.tokens or stop % self.tokens:
                raise self._not_whole(f"slots {start} to {stop}")
            return rows, slice(start // self.tokens, stop // self.tokens)
        if slots.shape[-1] % self.tokens:
            raise self._not_whole(f"{slots.shape[-1]} slots")
        groups = slots.unflatten(-1, (slots.shape[-1] // self.tokens, self.tokens))
        whole = groups == groups[..., :1] // self.tokens * self.tokens + torch.arange(
            self.tokens, device=slots.device
        )
        first = groups[..., 0] // self.tokens
        if isinstance(rows, Tensor):
            by_group = rows.expand_as(slots).unflatten(-1, groups.shape[-2:])
            whole = whole & (by_group == by_group[..., :1])
            rows = by_group[..., 0]
        if not whole.all():
            raise self._not_whole("slots that start elsewhere, have gaps or change row")
        return rows, first

    def _not_whole(self, given: str) -> ValueError:
        return ValueError(
            f"{self.tokens} slots share their scales, so only whole groups of {self.tokens} "
            f"consecutive slots from a multiple of {self.tokens} can change, got {given}; hold "
            "tokens back until a group is full"
        )


def quantized(keys: Codec, values: Codec | None = None) -> NewStore:
    """A maker of stores, called as ``DenseStore`` is: ``quantized(INT8)(kind, layers, …)``.

    Values take the codec of keys unless they have their own. Raises ``ValueError`` for what is
    not a codec.
    """
    values = keys if values is None else values
    for codec in (keys, values):
        if not isinstance(codec, Codec):
            raise ValueError(
                f"quantized() takes a Codec, such as INT8 or INT4.grouped(16), got {codec!r:.60}"
            )
    return partial(CodedStore, keys=keys, values=values)
