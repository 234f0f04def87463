"""Checks of what people give: counts, devices' names, and objects of the right class.

Knows: what a count is. Does not know: what is counted.
"""

from typing import Any

LARGEST = 2**31 - 1  # rows, slots, tokens: beyond, nothing could be allocated anyway


def check_sizes(**sizes: Any) -> None:
    """Raise ``ValueError`` unless every size is a positive integer."""
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r:.80}")
        _check_largest(name, value)


def check_counts_from_zero(**counts: Any) -> None:
    """Raise ``ValueError`` unless every count is an integer from 0 on."""
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} must be an integer from 0 on, got {value!r:.80}")
        _check_largest(name, value)


def check_class(name: str, value: Any, allowed: type, how: str) -> None:
    """Raise ``ValueError`` unless ``value`` is of the class; ``how`` says how to get one."""
    if not isinstance(value, allowed):
        raise ValueError(f"{name} must be a {allowed.__name__} ({how}), got {value!r:.80}")


def check_list(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is a list or a tuple."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list or a tuple, got {value!r:.80}")


def _check_largest(name: str, value: int) -> None:
    if value > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST:,}, got {value!r:.80}")
