"""Small codes: which numbers they stand for, what shares a scale, how far off a number may be."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbook.cache.codec import (
    FLOAT4,
    FLOAT8,
    INT4,
    INT8,
    Codec,
    Encoded,
)
from kvbook.cache.elements import Float4E2M1, Float8E4M3, Integer, pack, unpack
from kvbook.cache.scales import power_of_two, power_of_two_code

pytestmark = pytest.mark.usefixtures("one_thread")

INTEGERS = [INT8, INT4, replace(INT8, symmetric=False), replace(INT4, symmetric=True)]
EXACT_AT_THE_ENDS = [*INTEGERS, FLOAT8]
CODECS = [*EXACT_AT_THE_ENDS, FLOAT4]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SPECIMEN = {codec: f"{codec.element}-{'' if codec.symmetric else 'a'}symmetric" for codec in CODECS}


def name(value: Any) -> str | None:
    """Names of parameters: the codec, the type, or whatever pytest has."""
    return SPECIMEN.get(value) if isinstance(value, Codec) else None


def numbers(*row: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """One token of one head, (1, 1, D)."""
    return torch.tensor(row, dtype=dtype)[None, None]


def whole(codec: Codec, x: Tensor) -> list[float]:
    """One token's round trip, its whole width being one group."""
    return codec.grouped(x.shape[-1]).round_trip(x)[0, 0].tolist()


# ---- Element formats, number by number


def test_signed_8_bits_round_to_the_nearest_127th() -> None:
    """A tie, 63.5, goes to the even code."""
    encoded = INT8.grouped(5).encode(numbers(-1.0, -0.5, 0.0, 0.004, 1.0))
    assert encoded.codes.tolist() == [[[-127, -64, 0, 1, 127]]]
    assert encoded.scales.tolist() == [[[1.0]]]
    assert encoded.offsets.numel() == 0


def test_signed_4_bits() -> None:
    """Two's complement, two to a byte: −7 is 9, −4 is 12."""
    x = numbers(-7.0, -3.5, 0.5, 1.5, 7.0)
    codec = replace(INT4, symmetric=True)
    assert whole(codec, x) == [-7.0, -4.0, 0.0, 2.0, 7.0]
    assert codec.grouped(5).encode(x).codes.tolist() == [[[12 * 16 + 9, 2 * 16 + 0, 7]]]


def test_unsigned_4_bits_count_from_the_lowest() -> None:
    """Steps of 1 from −5: 0.5 and 1.5 steps are ties."""
    x = numbers(-5.0, -4.5, -3.5, 0.2, 10.0)
    encoded = INT4.grouped(5).encode(x)
    assert encoded.codes.tolist() == [[[0 + 16 * 0, 2 + 16 * 5, 15]]]
    assert (encoded.scales.item(), encoded.offsets.item()) == (10.0, -5.0)
    assert whole(INT4, x) == pytest.approx([-5.0, -5.0, -3.0, 0.0, 10.0], abs=1e-6)


def test_unsigned_8_bits_use_all_256_codes() -> None:
    x = torch.arange(1000.0, 1256.0)[None, None]
    encoded = replace(INT8, symmetric=False).grouped(256).encode(x)
    assert encoded.codes[0, 0].tolist() == list(range(256))
    assert whole(replace(INT8, symmetric=False), x) == list(range(1000, 1256))


def test_float8_has_three_bits_after_the_point() -> None:
    """With a peak of 448 the numbers are E4M3's own: 17 and 27 are ties, 2^−10 one with zero."""
    x = numbers(448.0, -17.0, 19.1, 27.0, 1.06, 2.0**-9, 2.0**-10, -240.0)
    assert whole(FLOAT8, x) == [448.0, -16.0, 20.0, 28.0, 1.0, 2.0**-9, 0.0, -240.0]


@pytest.mark.parametrize(
    ("number", "nearest"), [(336.000001, 352), (303.999999, 288), (-336.000001, -352)]
)
def test_float8_rounds_a_float64_once(number: float, nearest: float) -> None:
    """Next to the middle of 320 and 352, or 288 and 320: by way of float32 it would be a tie."""
    x = numbers(448, number, dtype=torch.float64)
    assert FLOAT8.grouped(2).round_trip(x).flatten().tolist() == [448, nearest]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("peak", [449.0, 500.0, 30_000.0])
def test_float8_beyond_448_is_scaled_and_not_lost(peak: float, dtype: torch.dtype) -> None:
    x = numbers(peak, -peak, 0.0, peak / 2, dtype=dtype)
    back = FLOAT8.grouped(4).round_trip(x)
    assert back.isfinite().all()
    assert back.tolist() == x.tolist()


def test_float4_has_eight_sizes_and_a_sign() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert Float4E2M1().decode(pack(codes), 16, torch.float32).tolist() == [
        0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6,
    ]  # fmt: skip


def test_float4_rounds_to_the_nearest_and_ties_to_the_even_code() -> None:
    sizes = [0.24, 0.25, 0.26, 0.74, 0.75, 1.25, 1.26, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, 6.0, 7.99]
    codes = [0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 7, 7]
    for sign in (0, 8):
        packed = Float4E2M1().encode(torch.tensor(sizes) * (-1 if sign else 1))
        assert unpack(packed)[:15].tolist() == [code + sign for code in codes]


@pytest.mark.parametrize("code", [0, 1, 126, 127, 128, 254])
def test_a_scale_byte_is_an_exponent_plus_127(code: int) -> None:
    for dtype in (torch.float32, torch.float64):
        assert power_of_two(torch.tensor(code), dtype).item() == 2.0 ** (code - 127)


def test_the_scale_byte_255_is_not_a_number() -> None:
    assert power_of_two(torch.tensor(255), torch.float32).isnan()
    assert power_of_two_code(torch.tensor([math.nan, math.inf])).tolist() == [255, 255]


@pytest.mark.parametrize(
    ("peak", "scale"),
    [(4.0, 1.0), (6.0, 1.0), (7.99, 1.0), (8.0, 2.0), (3.99, 0.5), (1.0, 0.25), (448.0, 64.0)],
)
def test_a_power_of_two_leaves_the_peak_from_4_to_8(peak: float, scale: float) -> None:
    assert power_of_two(power_of_two_code(torch.tensor(peak)), torch.float32).item() == scale


@pytest.mark.parametrize("peak", [0.0, 1e-45, 2.0**-126, 3e38])
def test_the_scale_byte_stays_in_its_range(peak: float) -> None:
    x = numbers(peak, -peak / 2, 0.0)
    back = FLOAT4.grouped(3).round_trip(x)
    assert torch.allclose(back, x, rtol=0.25, atol=2.0**-129)


def test_two_codes_share_a_byte() -> None:
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    assert unpack(pack(pairs)).equal(pairs)
    assert pack(pairs).flatten().tolist() == [low + 16 * high for low in range(16)
                                              for high in range(16)]  # fmt: skip


def test_a_last_code_alone_takes_a_byte() -> None:
    assert pack(torch.tensor([[3, 1, 2]], dtype=torch.uint8)).tolist() == [[19, 2]]


@pytest.mark.parametrize(
    ("element", "largest"),
    [
        (Integer(8, True), 127), (Integer(8, False), 255), (Integer(4, True), 7),
        (Integer(4, False), 15), (Float8E4M3(), 448), (Float4E2M1(), 6),
    ],
)  # fmt: skip
def test_the_largest_number_of_a_format_comes_back(element: Any, largest: float) -> None:
    assert element.largest == largest
    x = torch.tensor([[largest, 0.0, 1.0]])
    assert element.decode(element.encode(x), 3, torch.float32).equal(x)


# ---- What comes back exactly


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [(1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("codec", EXACT_AT_THE_ENDS, ids=name)
def test_a_constant_group_comes_back_exactly(
    codec: Codec, group: tuple[int, int], dtype: torch.dtype
) -> None:
    """openvinotoolkit/openvino#28326: a range of zero made the scale overflow or lost the value."""
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # subnormal
    for value in (0.0, 100.0, -3.0, 0.1, 60_000.0, 1e-7, least, torch.finfo(dtype).max):
        x = torch.full((4, 3, 4), value, dtype=dtype)
        encoded = replace(codec, group=group).encode(x)
        assert encoded.scales.isfinite().all()
        assert encoded.offsets.isfinite().all()
        assert replace(codec, group=group).decode(encoded, dtype).equal(x)


@pytest.mark.parametrize(
    ("value", "back"),
    [(0.0, 0.0), (1.0, 1.0), (1.5, 1.5), (-3.0, -3.0), (6.0, 6.0), (96.0, 96.0), (2.0**-30,) * 2,
     (100.0, 96.0), (0.1, 0.09375), (5.0, 4.0), (-7.0, -6.0), (1.75, 1.5)],
)  # fmt: skip
def test_a_power_of_two_keeps_only_some_constants(value: float, back: float) -> None:
    assert whole(FLOAT4, numbers(*[value] * 32)) == [back] * 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", EXACT_AT_THE_ENDS, ids=name)
def test_the_ends_of_a_group_come_back_exactly(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.randn(50, 2, 8).mul(3).add(1).to(dtype)
    back = codec.grouped(8).round_trip(x)
    peak = x.abs().argmax(-1, keepdim=True)
    assert back.gather(-1, peak).equal(x.gather(-1, peak))
    if not codec.symmetric:
        assert back.amin(-1).equal(x.amin(-1))
        assert back.amax(-1).equal(x.amax(-1))


@pytest.mark.parametrize("codec", CODECS, ids=name)
def test_float16_at_its_limits(codec: Codec) -> None:
    """The range 120,000 is beyond float16: no kept number may be."""
    x = numbers(60_000.0, -60_000.0, 30_000.0, 0.0, dtype=torch.float16)
    encoded = codec.grouped(4).encode(x)
    assert encoded.scales.isfinite().all()
    assert encoded.offsets.isfinite().all()
    back = codec.grouped(4).decode(encoded, x.dtype)
    assert (back - x).abs().max() <= 60_000 / 4


# ---- What shares a scale


@pytest.mark.parametrize("codec", CODECS, ids=name)
@pytest.mark.parametrize("group", [(1, 3), (2, 1), (4, 1), (2, 3), (4, 6)])
def test_a_group_is_consecutive_tokens_by_neighboring_channels_of_one_head(
    codec: Codec, group: tuple[int, int]
) -> None:
    """One huge number changes its own group and nothing else."""
    tokens, channels = group
    codec = replace(codec, group=group)
    x = torch.randn(2, 4, 3, 6)
    expected = torch.zeros(2, 4, 3, 6, dtype=torch.bool)
    t, c = 2 // tokens * tokens, 4 // channels * channels
    expected[1, t : t + tokens, 2, c : c + channels] = True
    before = codec.round_trip(x)
    x[1, 2, 2, 4] = 1e4
    after = codec.round_trip(x)
    assert (before != after)[~expected].sum() == 0
    assert after[1, 2, 2, 4] > 6_000
    # Beside it, everything small in its group has become the same: its range is wasted.
    assert after[expected].unique().numel() <= 2 + (codec.element == "float8_e4m3") * 24


@pytest.mark.parametrize("codec", CODECS, ids=name)
@pytest.mark.parametrize("group", [(1, 32), (32, 1)])
def test_shapes_and_types(codec: Codec, group: tuple[int, int]) -> None:
    x = torch.randn(2, 64, 3, 32, dtype=torch.bfloat16)
    codes, scales, offsets = replace(codec, group=group).encode(x)
    per_byte = 2 if codec.element in ("int4", "float4_e2m1") else 1
    groups = (2, 64 // group[0], 3, 32 // group[1])
    assert codes.shape == (2, 64, 3, 32 // per_byte)
    assert codes.element_size() == 1
    assert scales.shape == groups
    assert scales.dtype == (torch.uint8 if codec.element == "float4_e2m1" else torch.bfloat16)
    assert offsets.shape == ((*groups[:3], 0) if codec.symmetric else groups)
    back = replace(codec, group=group).decode(Encoded(codes, scales, offsets), x.dtype)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("codec", CODECS, ids=name)
@pytest.mark.parametrize("shape", [(3, 2, 0), (0, 2, 32), (2, 0, 2, 32), (0, 4, 1, 32)])
def test_nothing_takes_nothing(codec: Codec, shape: tuple[int, ...]) -> None:
    encoded = codec.encode(torch.zeros(shape))
    assert sum(piece.numel() for piece in encoded) == 0
    assert codec.decode(encoded, torch.float32).shape == shape


def test_an_outlying_channel_wants_a_scale_of_its_own() -> None:
    """huggingface/transformers#35185: one key channel far from zero costs all the others their
    4 bits, if they share its scale."""
    x = torch.randn(64, 1, 32, generator=torch.Generator().manual_seed(0))
    x[..., 7] += 50

    def error_of_the_others(codec: Codec) -> float:
        others = torch.arange(32) != 7
        return (codec.round_trip(x) - x)[..., others].square().mean().sqrt().item()

    per_token, per_channel = error_of_the_others(INT4), error_of_the_others(INT4.per_channel(64))
    assert round(per_token, 2) == 1.06
    assert round(per_channel, 2) == 0.09
    assert per_token > 10 * per_channel


# ---- How far off a number may be


@st.composite
def groups(draw: st.DrawFn, largest: float = math.inf) -> Tensor:
    """One token of one head, any numbers of any type up to ``largest``."""
    dtype = draw(st.sampled_from(DTYPES))
    bound = min(largest, torch.finfo(dtype).max)
    exponent = st.integers(-140, int(math.log2(bound)) - 1)
    extreme = st.builds(math.ldexp, st.floats(-1, 1), exponent)
    near = st.builds(lambda step: 100 + step / 1024, st.integers(-9, 9))
    value = st.one_of(extreme, near, st.sampled_from([0.0, -1.0, 1.0, bound, -bound]))
    row = draw(st.lists(value, min_size=1, max_size=9))
    return torch.tensor(row, dtype=torch.float64).to(dtype)[None, None]


def slack(x: Tensor) -> float:
    """Rounding to the type of the cache: half a unit in the last place, twice over."""
    info = torch.finfo(x.dtype)
    return info.eps * x.double().abs().max().item() + info.smallest_normal * info.eps


@pytest.mark.parametrize("codec", INTEGERS, ids=name)
@given(x=groups(largest=1e38))
def test_integers_are_at_most_half_a_step_off(codec: Codec, x: Tensor) -> None:
    codes = {"int8": 255, "int4": 15}[codec.element]
    exact = x.double()
    span = exact.max() - exact.min()
    step = 2 * exact.abs().max() / (codes - 1) if codec.symmetric else span / codes
    off = (codec.grouped(x.shape[-1]).round_trip(x).double() - exact).abs().max()
    assert off <= 0.5001 * step + slack(x)


@given(x=groups())
def test_float8_is_at_most_a_sixteenth_off(x: Tensor) -> None:
    exact = x.double()
    off = (FLOAT8.grouped(x.shape[-1]).round_trip(x).double() - exact).abs()
    allowed = exact.abs().maximum(exact.abs().max() / 28_672) / 16
    assert (off <= 1.0001 * allowed + slack(x)).all()


@given(x=groups(largest=1e38))
def test_float4_is_at_most_a_quarter_off(x: Tensor) -> None:
    """Of the number, or of the scale, which is at most a quarter of the peak, or 2^−127."""
    exact = x.double()
    off = (FLOAT4.grouped(x.shape[-1]).round_trip(x).double() - exact).abs()
    scale = max(2.0**-127, exact.abs().max().item() / 4)
    assert (off <= exact.abs().clamp(min=scale) / 4 + slack(x)).all()


@pytest.mark.parametrize("codec", CODECS, ids=name)
@given(x=groups(largest=1e38))
def test_a_second_round_trip_changes_nothing(codec: Codec, x: Tensor) -> None:
    """To the bit: the ends are exact, so the scale is the same, and so is every code."""
    codec = codec.grouped(x.shape[-1])
    once = codec.round_trip(x)
    assert codec.round_trip(once).equal(once)


@pytest.mark.parametrize("codec", CODECS, ids=name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0.0, 5.0, -300.0])
def test_many_groups_at_once_are_encoded_as_each_alone(
    codec: Codec, dtype: torch.dtype, shift: float
) -> None:
    x = (torch.randn(2, 8, 3, 12) + shift).to(dtype)
    alone = torch.empty_like(x)
    for b, t, h, c in torch.cartesian_prod(*map(torch.arange, (2, 4, 3, 3))).tolist():
        at = (b, slice(2 * t, 2 * t + 2), slice(h, h + 1), slice(4 * c, 4 * c + 4))
        alone[at] = replace(codec, group=(2, 4)).round_trip(x[at])
    assert replace(codec, group=(2, 4)).round_trip(x).equal(alone)


# ---- What is not a number


@pytest.mark.parametrize("codec", CODECS, ids=name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so_and_in_its_group(
    codec: Codec, value: float, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 1, 8).to(dtype)
    x[0, 0, 2] = value
    back = codec.grouped(4).round_trip(x)
    assert not back[0, 0, 2].isfinite()
    assert back[0, 0, 4:].isfinite().all()
    assert back[1].isfinite().all()


@pytest.mark.parametrize("codec", [INT4, replace(INT8, symmetric=False)], ids=name)
def test_a_range_beyond_the_largest_number_is_loud(codec: Codec) -> None:
    assert not math.isfinite(whole(codec, numbers(-3e38, 0.0, 3e38))[1])
    bfloat16 = numbers(-1.5e38, 0.0, 1.5e38, dtype=torch.bfloat16)
    assert math.isfinite(whole(codec, bfloat16)[1])


def test_a_peak_beyond_the_last_scale_byte_is_loud() -> None:
    assert whole(FLOAT4, numbers(2.0**129, dtype=torch.float64)) == [2.0**129]
    for exponent in (130, 131, 259, 386, 1000):
        assert math.isnan(whole(FLOAT4, numbers(2.0**exponent, dtype=torch.float64))[0])


# ---- Bad input


def test_an_unknown_element() -> None:
    with pytest.raises(ValueError, match=r"unknown element 'int3'; use one of int8, int4, float8"):
        Codec("int3")


@pytest.mark.parametrize("codec", [FLOAT8, FLOAT4], ids=name)
def test_floats_are_symmetric(codec: Codec) -> None:
    with pytest.raises(ValueError, match=codec.element + r" has a sign .* or one of int8, int4"):
        replace(codec, symmetric=False)


@pytest.mark.parametrize("group", [(0, 32), (1, 0), (-1, 1), (1, 2.0), (True, 4), (4,), 32, None])
def test_a_group_is_two_positive_integers(group: Any) -> None:
    with pytest.raises(ValueError, match=r"two positive integers, \(tokens, channels\), got"):
        Codec("int8", group)


def test_a_group_that_does_not_divide_the_width() -> None:
    message = r"groups of 32 channels do not divide a width of 6; .* n from \[1, 2, 3, 6\]"
    with pytest.raises(ValueError, match=message):
        INT8.encode(torch.zeros(1, 1, 6))


def test_a_group_that_does_not_divide_the_tokens() -> None:
    with pytest.raises(ValueError, match=r"groups of 4 tokens do not divide 6 tokens"):
        INT8.per_channel(4).encode(torch.zeros(6, 1, 6))


@pytest.mark.parametrize("element", [None, 8, True, ["int8"], b"int8", "INT8"], ids=repr)
def test_an_element_is_a_name(element: Any) -> None:
    with pytest.raises(ValueError, match="unknown element " + re.escape(repr(element))):
        Codec(element)


@pytest.mark.parametrize("symmetric", [None, 1, 0, "yes", [True]], ids=repr)
def test_symmetric_is_true_or_false(symmetric: Any) -> None:
    with pytest.raises(ValueError, match="True or False, got " + re.escape(repr(symmetric))):
        Codec("int8", symmetric=symmetric)


@pytest.mark.parametrize("n", [None, True, -1, 0, 2.0, math.nan, "8", [8], np.int64(8)], ids=repr)
def test_sizes_of_groups_are_positive_integers(n: Any) -> None:
    for make in (INT8.grouped, INT8.per_channel):
        with pytest.raises(ValueError, match="two positive integers.*got .*" + re.escape(repr(n))):
            make(n)


@pytest.mark.parametrize(
    "x",
    [
        None, 1.0, [[[1.0]]], np.zeros((1, 1, 32)), torch.zeros(32), torch.zeros(1, 32),
        torch.zeros(1, 1, 32, dtype=torch.int64), torch.zeros(1, 1, 32, dtype=torch.bool),
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')} {getattr(x, 'shape', '')}",
)  # fmt: skip
def test_what_is_encoded_are_vectors_of_heads_of_tokens(x: Any) -> None:
    for call in (INT8.encode, FLOAT4.round_trip):
        with pytest.raises(ValueError, match=r"floats of shape \(…, tokens, heads, D\), got"):
            call(x)


def test_a_build_without_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(ValueError, match=r"has no float8_e4m3fn, .* use int8"):
        FLOAT8.encode(torch.zeros(1, 1, 32))
