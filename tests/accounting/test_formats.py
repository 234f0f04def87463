"""Units and element formats, as they are written and read."""

import re

import pytest

from kvbook.accounting.formats import FORMATS, Format, parse_format, store_format
from kvbook.accounting.units import format_bytes, parse_bytes, parse_count


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
        ("float4", 128, (64, 4, 0)),
        ("float8", 128, (128, 8, 0)),
        ("fp8", 128, (128, 0, 0)),
        ("fp8_per_head", 128, (128, 0, 0)),
        ("fp8_per_token_head", 128, (128, 4, 0)),
        ("int8_per_token_head", 96, (96, 4, 0)),
        ("nvfp4", 128, (64, 8, 0)),
        ("q8_0", 128, (128, 8, 0)),
        ("q5_1", 128, (80, 8, 8)),
        ("q5_0", 128, (80, 8, 0)),
        ("q4_1", 128, (64, 8, 8)),
        ("q4_0", 128, (64, 8, 0)),
        ("iq4_nl", 128, (64, 8, 0)),
        ("4bit", 3, (2, 0, 0)),  # a vector takes whole bytes
    ],
)
def test_bytes_of_one_vector(name: str, width: int, parts: tuple[int, int, int]) -> None:
    form = parse_format(name)
    assert (form.data_bytes(width), form.scale_bytes(width), form.zero_bytes(width)) == parts
    assert form.vector_bytes(width) == sum(parts)


@pytest.mark.parametrize(
    ("name", "block"), [("q8_0", 34), ("q5_1", 24), ("q5_0", 22), ("q4_1", 20), ("q4_0", 18),
                        ("iq4_nl", 18)],
)  # fmt: skip
def test_blocks_of_32_as_llama_cpp_has_them(name: str, block: int) -> None:
    assert FORMATS[name].vector_bytes(32) == block


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fp8", "float8_e4m3: 8 bits per element, and one scale for each tensor, for which no "
         "token pays"),
        ("fp8_per_head", "fp8_per_head: 8 bits per element, and one scale for each head of a "
         "tensor, for which no token pays"),
        ("float8", "float8: 8 bits per element, and a 16-bit scale for each 32 elements of one "
         "head's vector of one token"),
        ("fp8_per_token_head", "fp8_per_token_head: 8 bits per element, and a 32-bit scale for "
         "each head of one token"),
        ("nvfp4", "nvfp4: 4 bits per element, and an 8-bit scale for each 16 elements of one "
         "head's vector of one token"),
        ("1bit", "1bit: 1 bit per element"),
    ],
)  # fmt: skip
def test_a_name_says_what_it_is(name: str, words: str) -> None:
    """float8 and fp8 are two things, and each says which."""
    assert parse_format(name).describe() == words


def test_int8_and_mxfp4_as_others_store_them() -> None:
    """q8_0 takes 34 bytes per 32 elements; MXFP4 takes 17."""
    assert FORMATS["int8"].vector_bytes(32) == 34
    assert FORMATS["mxfp4"].vector_bytes(32) == 17


def test_a_group_is_a_parameter() -> None:
    assert FORMATS["int4"].with_group(64).vector_bytes(128) == 64 + 4 + 4
    with pytest.raises(ValueError, match=r"bfloat16 has no groups.*got 64; formats with"):
        FORMATS["bfloat16"].with_group(64)
    with pytest.raises(ValueError, match="group must be at least 1, got 0"):
        FORMATS["int4"].with_group(0)


def test_a_typo_is_answered_with_a_near_name() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'bfloat61'; did you mean bfloat16"):
        parse_format("bfloat61")


@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head"])
def test_a_scale_per_head_has_no_group_size(name: str) -> None:
    with pytest.raises(ValueError, match="has no groups within a vector, so no group size, got 8"):
        parse_format(name).with_group(8)


def test_a_scale_per_channel_needs_scales() -> None:
    assert FORMATS["int4"].per_channel(32).group_tokens == 32
    with pytest.raises(ValueError, match="bfloat16 has no scales to share, got 32 tokens"):
        FORMATS["bfloat16"].per_channel(32)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("8192", 8_192), ("8,192", 8_192), ("1_000_000", 10**6), ("8k", 8_000),
     ("8K", 8_000), ("128Ki", 131_072), ("1.5k", 1_500), ("1M", 10**6), ("1 Mi", 1_048_576),
     ("-5", -5), ("+5", 5)],
)  # fmt: skip
def test_a_count_as_people_write_it(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "k", "1.5", "8,19", "8kB", "1e3", "8 192", "0x10", "1.0001k", "８", "1_2", "--1"]
)
def test_a_count_that_is_not_whole_or_not_clear_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a whole number, got " + re.escape(repr(text))):
        parse_count(text)


@pytest.mark.parametrize("parts", [{"group": 32}, {"scale_bits": 16}, {"zero_bits": 16}])
def test_scales_and_groups_come_together(parts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        Format("odd", 4, **parts)


def test_bits_are_spoken() -> None:
    for bits, words in ((8, "an 8-bit"), (11, "an 11-bit"), (16, "a 16-bit"), (18, "an 18-bit")):
        assert f"and {words} scale" in Format("x", 4, group=32, scale_bits=bits).describe()


@pytest.mark.parametrize("cache", ["8bit", "15bit", "fp8", "int8"])
def test_a_cache_before_it_is_encoded_has_at_least_16_bits(cache: str) -> None:
    with pytest.raises(ValueError, match=r"the type of a cache is a plain number format, got"):
        store_format("int8", cache)
