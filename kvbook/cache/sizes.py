"""Checks of numbers that people give.

Knows: what a count is. Does not know: what is counted.
"""

from typing import Any


def check_sizes(**sizes: Any) -> None:
    """Raise ``ValueError`` unless every size is a positive integer."""
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_counts_from_zero(**counts: Any) -> None:
    """Raise ``ValueError`` unless every count is an integer from 0 on."""
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} must be an integer from 0 on, got {value!r}")
