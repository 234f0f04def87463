"""The size turned around: what fits into a budget.

Knows: how to search, exactly, on sizes that never shrink as they hold more. Does not know: what
a size is made of.

A windowed layer bends the curve and blocks make steps of it, so dividing by a slope is wrong.
"""

from collections.abc import Callable
from dataclasses import replace

from kvbook.accounting.layers import Layer
from kvbook.accounting.need import CacheSize, check_size
from kvbook.accounting.units import check_count, check_flag


def max_tokens(size: CacheSize, budget: int, reserved: bool = False) -> int | None:
    """Tokens that each of ``size.batch`` sequences can hold in ``budget`` bytes.

    Counts need, or the reservation with ``reserved``; recurrent state too, where known. 0 if
    not one token fits, ``None`` if there is no limit.
    """
    check_size(size)
    check_flag("reserved", reserved)
    check_count("budget", budget)

    def fits(tokens: int) -> bool:
        return total_bytes(replace(size, tokens=tokens), reserved) <= budget

    if not any(grows(layer, reserved) for layer in size.geometry.layers):
        # Only windows grow, and no further than the widest.
        widest = max([(layer.window or 1) * layer.every for layer in size.geometry.layers])
        return None if fits(widest) else largest(fits, widest)
    too_many = 1
    while fits(too_many):
        too_many *= 2
    return largest(fits, too_many)


def max_sequences(size: CacheSize, budget: int, reserved: bool = False) -> int:
    """Sequences of ``size.tokens`` tokens that fit in ``budget`` bytes; 0 if not one does.

    The budget is one device's. With ``dp`` groups of devices the answer is for all groups together.

    Every sequence costs the same, so this is a division. Raises ``ValueError`` if one costs
    nothing.
    """
    check_count("budget", budget)
    check_size(size)
    check_flag("reserved", reserved)
    each = total_bytes(replace(size, batch=1, dp=1), reserved)
    if each == 0:
        raise ValueError(f"a sequence of {size.geometry.name} takes no cache; any number fits")
    return budget // each * size.dp


def grows(layer: Layer, reserved: bool) -> bool:
    """Whether a layer takes more with every longer text: windows do so in a reservation only."""
    unlimited = reserved or layer.window is None
    return bool(layer.per_token) and layer.source_tokens is None and unlimited


def total_bytes(size: CacheSize, reserved: bool = False) -> int:
    """What counts against a budget: need or reservation, and recurrent state where known."""
    cache = size.reserved_bytes if reserved else size.need_bytes
    return cache + (size.constant_state_bytes or 0)


def largest(fits: Callable[[int], bool], too_many: int) -> int:
    """The largest n below ``too_many`` that fits; 0 is taken to fit, ``too_many`` does not.

    ``fits`` must hold up to some n and nowhere after it.
    """
    low, high = 0, too_many
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
