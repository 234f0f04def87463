"""Units and element formats, as they are written and read."""

import re

import pytest

from kvbook.accounting.formats import FORMATS, Format, parse_format
from kvbook.accounting.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1B", 1), ("1kB", 1_000), ("1KiB", 1_024), ("80GB", 80_000_000_000),
        ("80GiB", 85_899_345_920), (" 1.5 MiB ", 1_572_864), ("0.5TB", 500_000_000_000),
        ("2TiB", 2_199_023_255_552), ("1.9B", 1),
    ],
)  # fmt: skip
def test_a_size_has_a_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "80G", "80gb", "GiB", "-1GiB", "1e3B", "", "1 2B", "nanB"])
def test_a_size_without_a_clear_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text)) + r"; units: TiB.*80GiB.*1024"):
        parse_bytes(text)


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte, got '0GiB'"):
        parse_bytes("0GiB")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1_023, "1023 B"), (1_024, "1 KiB"), (131_072, "128 KiB"),
        (4_294_967_296, "4 GiB"), (11_173_625_856, "10.406 GiB"), (1_536, "1.5 KiB"),
        (5 * 1024**5, "5,120 TiB"),
    ],
)  # fmt: skip
def test_sizes_are_shown_in_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bf16", 16), ("bfloat16", 16), ("fp16", 16), ("half", 16), ("FP32", 32), ("float64", 64),
        ("fp8", 8), ("fp8_e5m2", 8), ("float8_e4m3fn", 8), ("int8", 8), ("int4", 4), ("mxfp4", 4),
        ("4bit", 4), ("8 bits", 8), ("3-bit", 3),
    ],
)  # fmt: skip
def test_names_and_bits(name: str, bits: int) -> None:
    assert parse_format(name).bits == bits


@pytest.mark.parametrize("dtype", [2, 8, "2", "16", "0.5"])
def test_a_number_alone_could_be_bits_or_bytes(dtype: object) -> None:
    """ "8 bit" entered as 8 bytes made a published size eight times too large."""
    with pytest.raises(ValueError, match=r"bare number, bits or bytes; allowed: float64.*4bit"):
        parse_format(dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["", "fp7", "int", "16bytes", None])
def test_an_unknown_dtype_lists_the_known(dtype: object) -> None:
    with pytest.raises(ValueError, match=r"unknown dtype .*allowed: float64.*bf16"):
        parse_format(dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["0bit", "65bit"])
def test_bits_have_limits(dtype: str) -> None:
    with pytest.raises(ValueError, match="bits must be from 1 to 64"):
        parse_format(dtype)


@pytest.mark.parametrize(
    ("name", "width", "parts"),
    [
        ("bfloat16", 128, (256, 0, 0)),
        ("int8", 128, (128, 8, 0)),
        ("int4", 128, (64, 8, 8)),
        ("mxfp4", 128, (64, 4, 0)),
        ("mxfp4", 32, (16, 1, 0)),
        ("4bit", 3, (2, 0, 0)),  # a vector takes whole bytes
    ],
)
def test_bytes_of_one_vector(name: str, width: int, parts: tuple[int, int, int]) -> None:
    form = parse_format(name)
    assert (form.data_bytes(width), form.scale_bytes(width), form.zero_bytes(width)) == parts
    assert form.vector_bytes(width) == sum(parts)


def test_int8_and_mxfp4_as_others_store_them() -> None:
    """q8_0 takes 34 bytes per 32 elements; MXFP4 takes 17."""
    assert FORMATS["int8"].vector_bytes(32) == 34
    assert FORMATS["mxfp4"].vector_bytes(32) == 17


def test_a_group_is_a_parameter() -> None:
    assert FORMATS["int4"].with_group(64).vector_bytes(128) == 64 + 4 + 4
    with pytest.raises(ValueError, match=r"bfloat16 has no groups.*got 64; formats with groups: int8"):
        FORMATS["bfloat16"].with_group(64)
    with pytest.raises(ValueError, match="group must be at least 1, got 0"):
        FORMATS["int4"].with_group(0)


@pytest.mark.parametrize("parts", [{"group": 32}, {"scale_bits": 16}, {"zero_bits": 16}])
def test_scales_and_groups_come_together(parts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        Format("odd", 4, **parts)
