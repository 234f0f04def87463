"""Headers of GGUF files that announce what cannot be, written out by hand."""

import struct
from pathlib import Path

import pytest

from kvbook import WeightFileError
from kvbook.model import gguf_file
from kvbook.model.gguf_file import GGUFFile

UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10
F32, F16, Q4_1, I32 = 0, 1, 3, 26


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    return (
        text(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        + struct.pack("<IQ", kind, offset)
    )  # fmt: skip


def gguf(
    folder: Path, fields: list[bytes], tensors: list[bytes], data: bytes = b"", align: int = 32
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(fields + tensors)
    path = folder / "m.gguf"
    path.write_bytes(head + bytes(-len(head) % align) + data)
    return path


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def test_a_file_written_by_hand_is_read(tmp_path: Path) -> None:
    data = struct.pack("<8f", *range(8)).ljust(32, b"\0") + struct.pack("<2f", 8, 9)
    tensors = [tensor("a", [4, 2], F32, 0), tensor("b", [2], F32, 32)]
    file = GGUFFile(gguf(tmp_path, [field("k", UINT32, number(7))], tensors, data))
    assert file.metadata == {"k": 7}
    assert file.read("a").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert file.read("b").tolist() == [8, 9]


def nest(levels: int) -> bytes:
    """An array that holds one array, and so on; the innermost one is an empty array of u32."""
    return struct.pack("<IQ", ARRAY, 1) * levels + struct.pack("<IQ", UINT32, 0)


@pytest.mark.parametrize(("levels", "fits"), [(0, True), (3, True), (4, False), (10_000, False)])
def test_arrays_are_nested_so_far_and_no_further(levels: int, fits: bool, tmp_path: Path) -> None:
    path = gguf(tmp_path, [field("k", ARRAY, nest(levels))], [])
    if fits:
        assert str(GGUFFile(path).metadata["k"]) == "[" * (levels + 1) + "]" * (levels + 1)
    else:
        with pytest.raises(WeightFileError, match="nested more than 4 levels deep"):
            GGUFFile(path)


def test_values_are_counted_across_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ten = struct.pack("<IQ", 0, 10) + bytes(10)
    path = gguf(tmp_path, [field("a", ARRAY, ten), field("b", ARRAY, ten)], [])
    monkeypatch.setattr(gguf_file, "MOST_VALUES", 22)  # twice an array and its ten
    assert len(GGUFFile(path).metadata["b"]) == 10
    monkeypatch.setattr(gguf_file, "MOST_VALUES", 21)
    with pytest.raises(WeightFileError, match="more than 21 metadata values"):
        GGUFFile(path)


K = field("k", UINT32, number(7))
A = tensor("a", [8], F32, 0)


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ([K, K], [], "the key 'k' is there twice"),
        ([field("k", 99, b"")], [], "unknown value type 99"),
        ([field("k", STRING, struct.pack("<Q", 2**63))], [], "bytes are announced, more than the"),
        ([field("k", ARRAY, struct.pack("<IQ", UINT64, 2**63))], [], "damaged GGUF header near"),
        ([field("general.alignment", UINT32, number(0))], [], "alignment is 0, not a multiple"),
        ([field("general.alignment", UINT32, number(12))], [], "alignment is 12, not a multiple"),
        ([field("general.alignment", STRING, text("32"))], [], "alignment is '32', not a mult"),
        ([], [A, A], "the tensor 'a' is there twice"),
        ([], [tensor("a", [], F32, 0)], "'a' has 0 sizes, not 1 to 4"),
        ([], [tensor("a", [1] * 5, F32, 0)], "'a' has 5 sizes, not 1 to 4"),
        ([], [tensor("a", [0, 3], F32, 0)], r"'a' has sizes \[0, 3\]; none may be 0"),
        ([], [tensor("a", [33], Q4_1, 0)], r"sizes \[33\]; .* multiple of 32 for Q4_1"),
        ([], [tensor("a", [8], 99, 0)], "'a' has the unknown storage type 99"),
        ([], [tensor("a", [8], F32, 8)], "'a' starts at 8, not at a multiple of 32"),
        ([], [A, tensor("b", [8], F32, 2**63)], "ends inside tensor 'b': 0 of 32 bytes"),
        ([], [tensor("a", [2**62, 2**62], F32, 0)], "ends inside tensor 'a': 32 of "),
        ([], [A, tensor("b", [1], F32, 0)], "tensors '[ab]' and '[ab]' overlap"),
    ],
)
def test_what_cannot_be_is_named(
    fields: list[bytes], tensors: list[bytes], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightFileError, match=message):
        GGUFFile(gguf(tmp_path, fields, tensors, bytes(32)))


def test_counts_of_tensors_and_fields_are_not_believed(tmp_path: Path) -> None:
    for counts in ((2**63, 0), (0, 2**63), (2**63, 2**63)):
        path = tmp_path / "m.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(64))
        with pytest.raises(WeightFileError, match="damaged GGUF header near byte"):
            GGUFFile(path)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    file = GGUFFile(gguf(tmp_path, [], [tensor("a", [8], I32, 0)], bytes(32)))
    with pytest.raises(WeightFileError, match="'a' as I32, which does not hold weights"):
        file.read("a")


@pytest.mark.parametrize("name", ["gone.gguf", "empty.gguf", "folder.gguf"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(WeightFileError, match=f"{name} cannot be read"):
        GGUFFile(tmp_path / name)
