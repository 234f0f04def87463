"""Reading a GGUF file: its metadata, and its tensors as float32.

Knows: the layout of GGUF version 3. Does not know: what any field or tensor is for.

The file is a header and a block of data. The header holds key-value metadata, then for each tensor
its name, its sizes (the fastest-varying first, the reverse of NumPy's order), its storage type and
its offset into the data. Quantized blocks are decoded by the ``gguf`` package. The header is read
here because that package's reader takes 2 s for a vocabulary of 49,152 tokens, and this one 0.1 s.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvbook.errors import WeightFileError

# Metadata value types by their number in the file, as formats of the struct module.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

# Bounds on what a header may ask for, far above real files: a vocabulary has some 10^5 entries.
MOST_VALUES = 1 << 22  # metadata values, those inside arrays counted
MOST_LEVELS = 4  # of arrays in arrays
MOST_SIZES = 4  # of a tensor, as in ggml


class GGUFFile:
    """One GGUF file, its data mapped into memory and decoded tensor by tensor.

    ``metadata``: key -> number, bool, string or list of these.
    ``shapes``: tensor name -> shape in PyTorch's order.
    Raises ``WeightFileError`` when the file is not GGUF version 3, is damaged or ends too early:
    the header is read whole, and every tensor's place is checked, before any tensor is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, _Place] = {}
        try:  # a private map: never written back
            self._bytes = np.memmap(path, dtype=np.uint8, mode="c")
        except (OSError, ValueError) as error:
            raise WeightFileError(
                f"{path} cannot be read ({error}). Give the path of a GGUF file."
            ) from error
        cursor = _Cursor(self._bytes)
        try:
            self._read_header(cursor)
        except (struct.error, UnicodeDecodeError, _Damaged) as error:
            raise WeightFileError(
                f"{path} has a damaged GGUF header near byte {cursor.at:,} ({error}). Delete it "
                "and fetch it again."
            ) from error
        self._check_places()

    def _read_header(self, cursor: "_Cursor") -> None:
        magic, version = cursor.take(4), cursor.scalar("I")
        if magic != b"GGUF" or version != 3:
            raise WeightFileError(
                f"{self.path} starts with {magic!r}, version {version}; a GGUF file starts with "
                "b'GGUF', version 3. Give the path of such a file."
            )
        n_tensors, n_fields = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(n_fields):
            key = cursor.string()
            if key in self.metadata:
                raise _Damaged(f"the key {key!r:.80} is there twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        for _ in range(n_tensors):
            name = cursor.string()
            if name in self.shapes:
                raise _Damaged(f"the tensor {name!r:.80} is there twice")
            n_sizes = cursor.scalar("I")
            if not 1 <= n_sizes <= MOST_SIZES:
                raise _Damaged(f"{name!r:.80} has {n_sizes:,} sizes, not 1 to {MOST_SIZES}")
            sizes = [cursor.scalar("Q") for _ in range(n_sizes)]
            self.shapes[name] = tuple(reversed(sizes))
            self._places[name] = _place(name, sizes, cursor.scalar("I"), cursor.scalar("Q"))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment % 8:
            raise _Damaged(f"general.alignment is {alignment!r:.80}, not a multiple of 8")
        self._data_start = -(-cursor.at // alignment) * alignment
        for name, place in self._places.items():
            if place.offset % alignment:
                raise _Damaged(f"{name!r:.80} starts at {place.offset:,}, not at a multiple of "
                               f"{alignment}")

    def _check_places(self) -> None:
        """Raise ``WeightFileError`` unless every tensor has bytes of its own inside the file."""
        there = self._bytes.size - self._data_start
        end, before = 0, ""
        for name, place in sorted(self._places.items(), key=lambda item: item[1].offset):
            if place.offset < end:
                raise WeightFileError(
                    f"{self.path} is damaged: tensors {before!r:.80} and {name!r:.80} overlap. "
                    "Delete it and fetch it again."
                )
            if place.offset + place.n_bytes > there:
                left = min(max(there - place.offset, 0), place.n_bytes)
                raise WeightFileError(
                    f"{self.path} ends inside tensor {name!r:.80}: {left:,} of {place.n_bytes:,} "
                    "bytes are there. Delete the file and fetch it again."
                )
            end, before = place.offset + place.n_bytes, name

    def read(self, name: str) -> torch.Tensor:
        """Decode one tensor to float32, of shape ``shapes[name]``."""
        place = self._places[name]
        start = self._data_start + place.offset
        rows = self._bytes[start : start + place.n_bytes].reshape(-1, place.row_bytes)
        try:
            numbers = dequantize(rows, place.kind)
        except NotImplementedError as error:
            raise WeightFileError(
                f"{self.path} stores tensor {name!r:.80} as {place.kind.name}, which does not hold "
                "weights or is not supported. Fetch the model in another format, such as Q8_0."
            ) from error
        return torch.from_numpy(numbers).reshape(self.shapes[name])


class _Damaged(Exception):
    """What is wrong with a header, in words."""


@dataclass(frozen=True)
class _Place:
    """How a tensor is stored, and where: offsets count from the start of the data."""

    kind: GGMLQuantizationType
    offset: int
    row_bytes: int
    n_bytes: int


def _place(name: str, sizes: list[int], kind: int, offset: int) -> _Place:
    try:
        stored = GGMLQuantizationType(kind)
    except ValueError as error:
        raise _Damaged(f"{name!r:.80} has the unknown storage type {kind:,}") from error
    values_per_block, bytes_per_block = GGML_QUANT_SIZES[stored]
    if 0 in sizes or sizes[0] % values_per_block:
        raise _Damaged(
            f"{name!r:.80} has sizes {sizes}; none may be 0, and the first must be a multiple of "
            f"{values_per_block} for {stored.name}"
        )
    row_bytes = sizes[0] // values_per_block * bytes_per_block
    return _Place(stored, offset, row_bytes, math.prod(sizes[1:]) * row_bytes)


class _Cursor:
    """A place in a run of bytes that moves past what it reads. Numbers are little-endian."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data.data
        self.at = 0
        self._values = 0  # read so far, to bound the memory that a header can take

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise _Damaged(f"{count:,} bytes are announced, more than the file has left")
        return self.scalar(f"{count}s")

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int, level: int = 0) -> Any:
        self._values += 1
        if self._values > MOST_VALUES:
            raise _Damaged(f"more than {MOST_VALUES:,} metadata values")
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            if level == MOST_LEVELS:
                raise _Damaged(f"arrays are nested more than {MOST_LEVELS} levels deep")
            element, count = self.scalar("I"), self.scalar("Q")
            return [self.value(element, level + 1) for _ in range(count)]
        if kind not in SCALARS:
            raise _Damaged(f"unknown value type {kind:,}")
        return self.scalar(SCALARS[kind])
