"""Refusing an argument of the wrong kind, in words.

Knows: types and plain numbers. Does not know: what any argument is for.
"""

import math
import reprlib
from numbers import Real
from typing import Any


def check_is(name: str, value: object, *kinds: type) -> None:
    """Raise ``ValueError`` unless ``value`` is of one of the classes.

    >>> check_is("model", 3, dict, list)
    Traceback (most recent call last):
    ValueError: model must be a dict or list, got 3
    """
    if not isinstance(value, kinds):
        allowed = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name} must be a {allowed}, got {reprlib.repr(value)}")


def check_function(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {reprlib.repr(value)}")


def check_number(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf
) -> float:
    """A number from ``low`` to ``high`` as a float; bool is none, and NaN lies nowhere.

    >>> check_number("tolerance", float("nan"), 0, 1)
    Traceback (most recent call last):
    ValueError: tolerance must be a number from 0 to 1, got nan
    """
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not low <= value <= high:
        raise ValueError(
            f"{name} must be a number from {low} to {high}, got {reprlib.repr(value)}"
        )
    return float(value)
