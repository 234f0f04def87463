"""What a machine can do at most, and the least time that follows from it.

Knows: peak arithmetic, memory bandwidth, the roofline (Williams, Waterman, Patterson 2009). Does
not know: how close a program comes to it.

Machines that are known stand in presets.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbook.accounting.formats import parse_format
from kvbook.accounting.units import check_count, check_text, quoted

MOST = 10**30  # operations or bytes; far above any work, and a float holds it


@dataclass(frozen=True)
class Bound:
    """The least seconds that arithmetic and memory each take."""

    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """Nothing is faster than its slower half: the two overlap at best."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def limited_by(self) -> str:
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


@dataclass(frozen=True)
class Hardware:
    """Peaks of one device. ``source`` says where the numbers come from.

    ``peak_flops`` is in operations per second by dtype, ``bandwidth`` in bytes per second,
    ``memory`` in bytes, as the driver reports it. ``provenance`` holds what a measurement was
    taken with. Raises ``ValueError`` for a rate that is not a number above 0.
    """

    name: str
    peak_flops: Mapping[str, float]
    bandwidth: float
    memory: int | None
    source: str
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.peak_flops, Mapping):
            raise ValueError(
                "peak_flops must give operations per second by dtype, got "
                f"{quoted(self.peak_flops)}"
            )
        for dtype, peak in self.peak_flops.items():
            if parse_format(dtype).name != dtype:
                raise ValueError(f"write {parse_format(dtype).name!r} for {dtype!r} in peak_flops")
            check_rate(f"peak_flops[{dtype!r}]", peak)
        check_text("name", self.name)
        check_text("source", self.source)
        check_rate("bandwidth", self.bandwidth)
        if self.memory is not None:
            check_count("memory", self.memory)
        if not isinstance(self.provenance, Mapping):
            raise ValueError(f"provenance must be a table of facts, got {quoted(self.provenance)}")

    def peak(self, dtype: str) -> float:
        """Operations per second in ``dtype``; ``ValueError`` if it is not stated."""
        name = parse_format(dtype).name
        if name not in self.peak_flops:
            raise ValueError(
                f"{self.name} has no peak for {name}; stated: "
                f"{', '.join(self.peak_flops) or 'none'}"
            )
        return self.peak_flops[name]

    def ridge(self, dtype: str) -> float:
        """Operations per byte above which arithmetic, not memory, is the limit."""
        return self.peak(dtype) / self.bandwidth

    def bound(self, flops: int, moved_bytes: int, dtype: str) -> Bound:
        """The least time for so many operations in ``dtype`` and so many bytes.

        Streaming 140 GB of weights at 3.35 TB/s takes 41.8 ms, whatever the arithmetic.
        """
        check_count("flops", flops, 0, MOST)
        check_count("moved_bytes", moved_bytes, 0, MOST)
        return Bound(flops / self.peak(dtype), moved_bytes / self.bandwidth)


def check_rate(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):  # type: ignore[operator]  # a number by now
        raise ValueError(f"{name} must be above 0, got {quoted(value)}")
