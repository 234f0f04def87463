"""Whole numbers that people wrote down, checked.

Knows: what a count is. Does not know: what is counted.
"""


def check_count(name: str, value: object, low: int = 1, high: int | None = None) -> int:
    """``value`` if it is a whole number from ``low`` to ``high``, else ``ValueError``."""
    allowed = f"at least {low:,}" if high is None else f"from {low:,} to {high:,}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number {allowed}, got {value!r:.60}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}")
    return value


def shown(value: int) -> str:
    """An integer as an error message prints it: one of thousands of digits is cut short."""
    return f"{value:,}" if abs(value) < 10**30 else f"a number of {value.bit_length():,} bits"
