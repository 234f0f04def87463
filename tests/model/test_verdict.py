"""Rounding, a clear break, or neither: what an error says about an experiment."""

import math

import numpy as np
import pytest
import torch

from kvbook import verdict


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (0, "ok"),
        (9.9e-11, "ok"),
        (torch.tensor(1e-12), "ok"),
        (torch.tensor([[1e-12]]), "ok"),
        (np.float32(1e-12), "ok"),
        (1e-3, "BROKEN"),  # from ``clear`` on
        (5, "BROKEN"),
        (math.inf, "BROKEN"),
        (math.nan, "BROKEN"),
        (torch.tensor(math.nan), "BROKEN"),
    ],
)
def test_rounding_is_ok_and_a_clear_break_is_broken(error: float, word: str) -> None:
    assert verdict(error) == word


@pytest.mark.parametrize("error", [1e-10, 1e-5, 9.9e-4])
def test_between_the_two_there_is_no_verdict(error: float) -> None:
    """An error of exactly ``rounding`` is no rounding any more."""
    with pytest.raises(ValueError, match=r"neither rounding .* nor a clear break"):
        verdict(error)


def test_the_bounds_can_be_moved() -> None:
    assert verdict(1e-5, rounding=1e-4) == "ok"
    assert verdict(1e-5, clear=1e-5) == "BROKEN"


@pytest.mark.parametrize(
    "error",
    [-1e-12, -math.inf, True, None, "0", [0.0], torch.zeros(2), torch.tensor(True),
     torch.empty(0)],
)  # fmt: skip
def test_what_is_no_error_is_refused(error: object) -> None:
    with pytest.raises(ValueError, match=r"one number from 0 on, got .*\.abs\(\)\.max\(\)"):
        verdict(error)  # type: ignore[arg-type]


@pytest.mark.parametrize("bounds", [(1e-3, 1e-10), (-1.0, 1.0)])
def test_bounds_in_the_wrong_order_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="bounds must be 0 <= rounding <= clear, got rounding"):
        verdict(1.0, *bounds)


@pytest.mark.parametrize("bounds", [(math.nan, 1.0), (0.1, math.nan), ("0", 1.0), (0.0, True)])
def test_bounds_that_are_no_numbers_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"(rounding|clear) must be a number from .*, got "):
        verdict(1.0, *bounds)
