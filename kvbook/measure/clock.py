"""When something began and when it was done.

Knows: a host's clock, a device's queue and its events. Does not know: what is timed, how often,
what the times mean.

An accelerator takes orders into a queue and the call returns at once: a clock that is read before
the queue is empty times the ordering, not the work. So a mark is made in one of two ways, and both
are safe for work that runs on the host as well.
"""

import reprlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvbook.model.target import usable_device


class Clock(Protocol):
    """Marks points in time and tells how far apart they are."""

    @property
    def name(self) -> str:
        """What the times are taken with, for the record."""

    def mark(self) -> Any:
        """The moment at which all work ordered so far is done."""

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks, once the second has come."""


class Event(Protocol):
    """What ``torch.cuda.Event`` and its siblings offer."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds."""


def nothing() -> None:
    """What there is to wait for on a CPU: its operations are done when they return."""


@dataclass(frozen=True)
class HostClock:
    """A monotonic host clock that is read when the device's queue is empty.

    A timed region holds one wait, the one that closes it; the mark before it drained the queue.
    """

    wait: Callable[[], None] = nothing
    now: Callable[[], float] = time.perf_counter  # seconds
    name: str = "host clock"

    def mark(self) -> float:
        self.wait()
        return self.now()

    def seconds(self, start: float, end: float) -> float:
        return end - start


@dataclass(frozen=True)
class EventClock:
    """Marks that the device itself stamps as it reaches them in its queue.

    Making one costs the host no wait; asking for the time between two waits once, for the later.
    """

    new_event: Callable[[], Event]
    name: str = "device events"

    def mark(self) -> Event:
        event = self.new_event()
        event.record()
        return event

    def seconds(self, start: Event, end: Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    if torch.accelerator.is_available():
        return torch.device(torch.accelerator.current_accelerator() or "cpu")
    return torch.device("cpu")


def chosen_device(device: torch.device | str | None = None) -> torch.device:
    """``device``, or the default one; ``ValueError`` for one that cannot be used here."""
    return default_device() if device is None else usable_device(device)


def check_clock(clock: object) -> None:
    """Raise ``ValueError`` for what cannot mark moments."""
    if not all(callable(getattr(clock, method, None)) for method in ("mark", "seconds")):
        raise ValueError(
            f"clock must be a Clock, as clock_for() makes it, got {reprlib.repr(clock)}"
        )


def clock_for(device: torch.device | str | None = None) -> Clock:
    """The best clock of a device: its events where it has them, else the host's clock.

    Without a device, that of the accelerator if there is one: it also times work on the CPU
    rightly. Events are recorded in the current stream of the current device. ``ValueError`` for
    a device that cannot be used here.
    """
    device = chosen_device(device)
    if device.type == "cpu":
        return HostClock()
    module = torch.get_device_module(device)
    if hasattr(module, "Event"):
        return EventClock(lambda: module.Event(enable_timing=True))
    return HostClock(module.synchronize)
