"""Known machines: every figure once more, written out by hand."""

import pytest

from kvbook.accounting.hardware import Hardware
from kvbook.accounting.presets import MACS, PRESETS, preset

# name: memory in bytes, bytes per second, operations per second in float32, float16, bfloat16, fp8.
FIGURES: dict[str, tuple[int, float, list[float]]] = {
    "A100-SXM-40GB": (42_949_672_960, 1.555e12, [19.5e12, 312e12, 312e12]),
    "A100-SXM-80GB": (85_899_345_920, 2.039e12, [19.5e12, 312e12, 312e12]),
    "H100-SXM": (85_520_809_984, 3.35e12, [67e12, 989e12, 989e12, 1_979e12]),
    "H200-SXM": (150_754_820_096, 4.8e12, [67e12, 989e12, 989e12, 1_979e12]),
    "B200-SXM": (192_265_846_784, 7.672e12, [75e12, 2_250e12, 2_250e12, 4_500e12]),
    "L40S": (48_305_799_168, 0.864e12, [91.6e12, 362.05e12, 362.05e12, 733e12]),
    "RTX-4090": (25_757_220_864, 1.008e12, [82.6e12, 165.2e12, 165.2e12]),
    "RTX-5090": (34_190_917_632, 1.792e12, [104.8e12, 209.5e12, 209.5e12]),
    "MI300X": (206_141_652_992, 5.3e12, [163.4e12, 1_307.4e12, 1_307.4e12, 2_614.9e12]),
    "MI355X": (288_000_000_000, 8e12, [157.3e12, 2_516.6e12, 2_516.6e12, 5_033.2e12]),
    "M2-Max-32GB": (22_906_503_168, 0.4e12, []),
    "M2-Max-96GB": (77_309_411_328, 0.4e12, []),
}
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3")


def test_these_are_all() -> None:
    assert [*PRESETS, *MACS] == list(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_figures(name: str) -> None:
    known, (memory, bandwidth, peaks) = preset(name), FIGURES[name]
    assert known.name == name
    assert known.memory == memory
    assert known.bandwidth == bandwidth
    assert dict(known.peak_flops) == dict(zip(DTYPES, peaks, strict=False))
    assert "20" in known.source  # a year


def test_a_card_of_80_gb_has_neither_80_gb_nor_80_gib() -> None:
    memory = PRESETS["H100-SXM"].memory
    assert memory == 81_559 * 1024**2
    assert round(memory / 1e9, 1) == 85.5
    assert round(memory / 1024**3, 2) == 79.65


@pytest.mark.parametrize("name", PRESETS)
def test_peaks_are_plausible(name: str) -> None:
    """Dense peaks: a ridge of some hundred operations per byte; 16 bits beat 32, and 8 beat 16."""
    known = PRESETS[name]
    assert 100 < known.ridge("bfloat16") < 450
    assert known.peak("bfloat16") > known.peak("float32")
    assert known.peak_flops.get("float8_e4m3", 2e18) > 1.9 * known.peak("bfloat16")


def test_a_machine_without_stated_peaks_says_so() -> None:
    with pytest.raises(ValueError, match="M2-Max-96GB has no peak for bfloat16; stated: none"):
        MACS["M2-Max-96GB"].peak("bf16")


@pytest.mark.parametrize("name", ["H100-SXM", "h100-sxm", " H100 SXM ", "h100"])
def test_a_machine_by_name(name: str) -> None:
    assert preset(name) is PRESETS["H100-SXM"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("H100-SMX", r"no machine named 'H100-SMX'; did you mean H100-SXM"),
        ("zzz", r"no machine named 'zzz'; known: A100-SXM-40GB, "),
        (None, "no machine named None; known: "),
        (5, "no machine named 5; known: "),
    ],
)
def test_an_unknown_machine(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name)


def test_each_is_hardware() -> None:
    assert all(isinstance(known, Hardware) for known in PRESETS.values())
