"""Time, as a server sees it: by the clock on the wall, or counted.

Knows: when it is. Does not know: requests, models.
"""

import time
from typing import Protocol

from kvbook.cache.sizes import check_class


class Clock(Protocol):
    """What scheduler, engine and traces ask of a clock."""

    def now(self) -> float:
        """The time. It never goes back."""

    def forward(self, tokens: int) -> None:
        """One forward pass over so many tokens has been run."""

    def wait_until(self, time: float) -> None:
        """Nothing happens before ``time``."""


class WallClock:
    """Seconds since the clock was made. Work takes what it takes."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def forward(self, tokens: int) -> None:
        """Its time has passed already."""

    def wait_until(self, time_: float) -> None:
        time.sleep(max(0.0, time_ - self.now()))


class LogicalClock:
    """Time that only work makes pass: the same on every machine.

    A forward pass over n tokens takes ``per_forward + n * per_token`` units, as one that streams
    the weights once and multiplies each token with them. Waiting takes no time but the clock's.

    >>> clock = LogicalClock(per_forward=1.0, per_token=0.25)
    >>> clock.forward(4)
    >>> clock.wait_until(1.5)
    >>> clock.now()
    2.0
    """

    def __init__(self, per_forward: float = 1.0, per_token: float = 0.0) -> None:
        for name, value in (("per_forward", per_forward), ("per_token", per_token)):
            if type(value) not in (int, float) or not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number from 0 on, got {value!r:.60}")
        self.per_forward, self.per_token = per_forward, per_token
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def forward(self, tokens: int) -> None:
        self._now += self.per_forward + tokens * self.per_token

    def wait_until(self, time: float) -> None:
        self._now = max(self._now, time)


def check_clock(clock: Clock) -> None:
    """Raise ``ValueError`` unless this is a clock."""
    if not all(hasattr(clock, name) for name in ("now", "forward", "wait_until")):
        check_class("clock", clock, WallClock, "WallClock() or LogicalClock()")
