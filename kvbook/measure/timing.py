"""How long a function takes.

Knows: warm-up, repetitions, median and spread, what lies outside the timed region, what time is
too short to be true. Does not know: devices (that is the clock), models, how many operations or
bytes a function moves.
"""

import reprlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvbook.accounting.hardware import Bound
from kvbook.accounting.units import check_count, format_bytes
from kvbook.measure.clock import Clock, check_clock, chosen_device, clock_for, nothing
from kvbook.measure.machine import last_level_cache
from kvbook.model.arguments import check_function, check_is, check_number

MOST_REPETITIONS = 1_000
FLUSH_FACTOR = 4  # how many times the last-level cache a flush writes


class TooFastError(ValueError):
    """A time below what the stated hardware can reach."""


@dataclass(frozen=True)
class Timing:
    """Seconds of every repetition, in the order in which they ran, warm-up left out.

    ``working_set`` is the bytes that one repetition touches, as the caller states them.
    """

    seconds: tuple[float, ...]
    clock: str
    working_set: int | None = None
    last_level_cache: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """The fastest repetition: for peaks, never for comparisons."""
        return min(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the repetitions were faster than the first, a quarter slower than the
        second."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a part of the median."""
        low, high = self.quartiles
        return (high - low) / self.median

    @property
    def fits_in_cache(self) -> bool | None:
        """Whether the working set can stay in the last-level cache; ``None`` if not known.

        If it can, and nothing flushed it, a rate of bytes is the cache's and not the memory's.
        """
        if self.working_set is None or self.last_level_cache is None:
            return None
        return self.working_set <= self.last_level_cache

    def rate(self, amount: float) -> float:
        """``amount`` per second, by the median: bytes, operations or tokens of one repetition."""
        return amount / self.median

    def describe(self) -> str:
        """One line: time, spread, and the working set against the cache."""
        low, high = self.quartiles
        return (
            f"{format_seconds(self.median)} (quartiles {format_seconds(low)} to "
            f"{format_seconds(high)}, {len(self.seconds)} repetitions, {self.clock}); "
            f"{describe_working_set(self.working_set, self.last_level_cache)}"
        )


def measure(
    fn: Callable[[], Any],
    *,
    before: Callable[[], Any] = nothing,
    warmup: int = 3,
    repetitions: int = 15,
    least_seconds: float = 0.1,
    device: torch.device | str | None = None,
    clock: Clock | None = None,
    working_set: int | None = None,
    bound: Bound | None = None,
    tolerance: float = 0.0,
) -> Timing:
    """Time ``fn()``: ``warmup`` calls that do not count, then repetitions, each its own region.

    ``before()`` runs ahead of every call, outside the timed region: it flushes a processor cache
    or takes a KV cache back to its length. There are at least ``repetitions``, and more (up to
    1,000) until they last ``least_seconds`` together.

    ``bound`` is the least time by a stated hardware, ``Hardware.bound(flops, bytes, dtype)``. A
    median below it by more than ``tolerance``, a part of the bound that allows for the noise of a
    measured peak, raises ``TooFastError``. Raises ``ValueError`` for a negative or zero count, for
    a device that cannot be used here and for a function that is too short for the clock.

    >>> measure(lambda: sum(range(1000)), repetitions=5).median < 1
    True
    """
    settings = _Settings(before, warmup, repetitions, least_seconds)
    device = chosen_device(device)
    clock = clock_for(device) if clock is None else clock
    check_function("fn", fn)
    check_clock(clock)
    if working_set is not None:
        check_count("working_set", working_set)
    if bound is not None:
        check_is("bound", bound, Bound)
    if check_number("tolerance", tolerance, 0, 1) == 1:
        raise ValueError(f"tolerance must be below 1, got {tolerance!r}")
    times = _repeat({"": fn}, clock, settings)[""]
    timing = Timing(tuple(times), clock.name, working_set, last_level_cache(device))
    _refuse(timing, bound, tolerance)
    return timing


def compare(
    fns: Mapping[str, Callable[[], Any]],
    *,
    before: Callable[[], Any] = nothing,
    warmup: int = 3,
    repetitions: int = 15,
    least_seconds: float = 0.1,
    device: torch.device | str | None = None,
    clock: Clock | None = None,
) -> dict[str, Timing]:
    """Time several functions side by side, so that a slow minute of the machine hits all.

    Each is warmed up, then they take turns, every other round in reverse order. The parameters
    are those of ``measure``.
    """
    settings = _Settings(before, warmup, repetitions, least_seconds)
    if not isinstance(fns, Mapping) or not fns:
        raise ValueError(
            f"compare() was given no functions by name, got {reprlib.repr(fns)}; name at least one"
        )
    for name, fn in fns.items():
        check_function(f"the function {name!r:.40}", fn)
    device = chosen_device(device)
    clock = clock_for(device) if clock is None else clock
    check_clock(clock)
    times = _repeat(fns, clock, settings)
    return {name: Timing(tuple(taken), clock.name) for name, taken in times.items()}


def flush_cache(device: torch.device | str = "cpu") -> Callable[[], None]:
    """A function that pushes everything else out of the last-level cache, for ``before``.

    It writes four times the cache's size. ``ValueError`` if that size is not known.
    """
    size = last_level_cache(device)
    if size is None:
        raise ValueError(
            f"the system does not say how large the last-level cache of {device} is; "
            "use a working set of several hundred MiB instead of a flush"
        )
    buffer = torch.zeros(FLUSH_FACTOR * size, dtype=torch.uint8, device=device)

    def flush() -> None:
        buffer.fill_(1)

    return flush


# ---- Inside


@dataclass(frozen=True)
class _Settings:
    before: Callable[[], Any]
    warmup: int
    repetitions: int
    least_seconds: float

    def __post_init__(self) -> None:
        check_function("before", self.before)
        check_count("warmup", self.warmup, 0, MOST_REPETITIONS)
        check_count("repetitions", self.repetitions, 1, MOST_REPETITIONS)
        check_number("least_seconds", self.least_seconds, 0)


def _repeat(
    fns: Mapping[str, Callable[[], Any]], clock: Clock, settings: _Settings
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in fns}
    for name in fns:
        for _ in range(settings.warmup):
            _region(fns[name], clock, settings.before)
    order, rounds, total = list(fns), 0, 0.0
    while rounds < settings.repetitions or (
        total < settings.least_seconds and rounds < MOST_REPETITIONS
    ):
        for name in order:
            times[name].append(_region(fns[name], clock, settings.before))
        total = sum(sum(taken) for taken in times.values())
        order.reverse()  # so that no one always runs in another's wake
        rounds += 1
    for name, taken in times.items():
        if not statistics.median(taken) > 0:
            raise ValueError(
                f"function {name!r} took {statistics.median(taken)} s by the {clock.name}, too "
                "short for it; do more work in one call"
            )
    return times


def _region(fn: Callable[[], Any], clock: Clock, before: Callable[[], Any]) -> float:
    before()
    start = clock.mark()
    fn()
    end = clock.mark()
    return clock.seconds(start, end)


def _refuse(timing: Timing, bound: Bound | None, tolerance: float) -> None:
    if bound is None or timing.median >= bound.seconds * (1 - tolerance):
        return
    raise TooFastError(
        f"measured {format_seconds(timing.median)}, but {bound.limited_by} alone takes at least "
        f"{format_seconds(bound.seconds)} at the stated peak; "
        f"{describe_working_set(timing.working_set, timing.last_level_cache)}. Check the stated "
        "operations and bytes, flush the cache, and see that the clock waits for the device"
    )


def describe_working_set(working_set: int | None, cache: int | None) -> str:
    """The working set beside the last-level cache, in words."""
    held = "of unknown size" if cache is None else f"of {format_bytes(cache)}"
    if working_set is None:
        return f"working set not stated, last-level cache {held}"
    stated = f"working set {format_bytes(working_set)}"
    if cache is None:
        return f"{stated}, last-level cache {held}"
    return f"{stated}, {working_set / cache:.2f} times the last-level cache {held}"


def format_seconds(seconds: float) -> str:
    """Three significant digits and a unit.

    >>> format_seconds(0.00123), format_seconds(2.5), format_seconds(4.2e-7)
    ('1.23 ms', '2.5 s', '420 ns')
    """
    check_number("seconds", seconds, 0)
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
