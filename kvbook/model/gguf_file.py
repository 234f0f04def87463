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


class GGUFFile:
    """One GGUF file, its data mapped into memory and decoded tensor by tensor.

    ``metadata``: key -> number, bool, string or list of these.
    ``shapes``: tensor name -> shape in PyTorch's order.
    Raises ``WeightFileError`` when the file is not GGUF version 3 or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[GGMLQuantizationType, int]] = {}
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c")  # private: never written back
        cursor = _Cursor(self._bytes)
        try:
            self._read_header(cursor)
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise WeightFileError(
                f"{path} has a damaged GGUF header near byte {cursor.at:,} ({error}). Delete it "
                "and fetch it again."
            ) from error

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
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        for _ in range(n_tensors):
            name = cursor.string()
            sizes = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            self.shapes[name] = tuple(reversed(sizes))
            self._places[name] = (GGMLQuantizationType(cursor.scalar("I")), cursor.scalar("Q"))
        alignment = self.metadata.get("general.alignment", 32)
        self._data_start = -(-cursor.at // alignment) * alignment

    def read(self, name: str) -> torch.Tensor:
        """Decode one tensor to float32, of shape ``shapes[name]``."""
        kind, offset = self._places[name]
        shape = self.shapes[name]
        values_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
        n_bytes = math.prod(shape) // values_per_block * bytes_per_block
        start = self._data_start + offset
        raw = self._bytes[start : start + n_bytes]
        if raw.size != n_bytes:
            raise WeightFileError(
                f"{self.path} ends inside tensor {name!r}: {raw.size:,} of {n_bytes:,} bytes are "
                "there. Delete the file and fetch it again."
            )
        rows = raw.reshape(-1, shape[-1] // values_per_block * bytes_per_block)
        return torch.from_numpy(dequantize(rows, kind)).reshape(shape)


class _Cursor:
    """A place in a run of bytes that moves past what it reads. Numbers are little-endian."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data.data
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def take(self, count: int) -> bytes:
        return self.scalar(f"{count}s")

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            return [self.value(element) for _ in range(count)]
        return self.scalar(SCALARS[kind])
