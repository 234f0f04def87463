"""The roofline: a bound, never an estimate."""

from typing import Any

import pytest

from kvbook.accounting.hardware import Hardware
from kvbook.accounting.presets import PRESETS

TOY: dict[str, Any] = {
    "name": "toy", "peak_flops": {"float32": 100.0}, "bandwidth": 10.0, "memory": 1_000,
    "source": "made up",
}  # fmt: skip


@pytest.mark.parametrize(
    ("flops", "moved", "seconds", "limit"),
    [(1_000, 10, 10.0, "compute"), (100, 50, 5.0, "memory"), (100, 10, 1.0, "compute")],
)
def test_the_slower_half_decides(flops: int, moved: int, seconds: float, limit: str) -> None:
    bound = Hardware(**TOY).bound(flops, moved, "float32")
    assert (bound.seconds, bound.limited_by) == (seconds, limit)


def test_the_ridge_is_where_the_halves_meet() -> None:
    toy = Hardware(**TOY)
    assert toy.ridge("fp32") == 10.0
    assert toy.bound(1_000, 100, "fp32").compute_seconds == 10.0
    assert toy.bound(1_000, 100, "fp32").memory_seconds == 10.0


def test_streaming_the_weights_of_a_70b_model() -> None:
    """140 GB at 3.35 TB/s: 41.8 ms for a token, before any arithmetic."""
    bound = PRESETS["H100-SXM"].bound(0, 140 * 10**9, "bfloat16")
    assert round(bound.seconds * 1_000, 1) == 41.8
    assert bound.limited_by == "memory"


def test_a_peak_that_is_not_stated() -> None:
    with pytest.raises(ValueError, match=r"toy has no peak for bfloat16; stated: float32"):
        Hardware(**TOY).bound(1, 1, "bf16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth": 0}, "bandwidth must be above 0"),
        ({"bandwidth": float("nan")}, "bandwidth must be above 0"),
        ({"peak_flops": {"float32": -1.0}}, r"peak_flops\['float32'\] must be above 0"),
        ({"peak_flops": {"fp32": 1.0}}, "write 'float32' for 'fp32'"),
        ({"peak_flops": {"fp7": 1.0}}, "unknown dtype 'fp7'"),
        ({"memory": 0}, "memory must be at least 1"),
    ],
)
def test_a_machine_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hardware(**{**TOY, **change})


@pytest.mark.parametrize("moved", [-1, 1.5])
def test_work_is_counted_in_whole_numbers(moved: Any) -> None:
    with pytest.raises(ValueError, match="moved_bytes must be"):
        Hardware(**TOY).bound(1, moved, "float32")
