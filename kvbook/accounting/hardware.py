"""What a machine can do at most, and the least time that follows from it.

Knows: peak arithmetic, memory bandwidth, the roofline (Williams, Waterman, Patterson 2009). Does
not know: how close a program comes to it.

Vendors print peaks with and without sparsity; these are without, for dense matrices. GB and TB
are powers of 1000 here, as vendors write them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbook.accounting.formats import parse_format
from kvbook.accounting.units import check_count


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
    ``memory`` in bytes. ``provenance`` holds what a measurement was taken with.
    """

    name: str
    peak_flops: Mapping[str, float]
    bandwidth: float
    memory: int | None
    source: str
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for dtype, peak in self.peak_flops.items():
            if parse_format(dtype).name != dtype:
                raise ValueError(f"write {parse_format(dtype).name!r} for {dtype!r} in peak_flops")
            if not peak > 0:
                raise ValueError(f"peak_flops[{dtype!r}] must be above 0, got {peak!r}")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be above 0 bytes per second, got {self.bandwidth!r}")
        if self.memory is not None:
            check_count("memory", self.memory)

    def peak(self, dtype: str) -> float:
        """Operations per second in ``dtype``; ``ValueError`` if it is not stated."""
        name = parse_format(dtype).name
        if name not in self.peak_flops:
            raise ValueError(
                f"{self.name} has no peak for {name}; stated: {', '.join(self.peak_flops)}"
            )
        return self.peak_flops[name]

    def ridge(self, dtype: str) -> float:
        """Operations per byte above which arithmetic, not memory, is the limit."""
        return self.peak(dtype) / self.bandwidth

    def bound(self, flops: int, moved_bytes: int, dtype: str) -> Bound:
        """The least time for so many operations in ``dtype`` and so many bytes.

        Streaming 140 GB of weights at 3.35 TB/s takes 41.8 ms, whatever the arithmetic.
        """
        check_count("flops", flops, 0)
        check_count("moved_bytes", moved_bytes, 0)
        return Bound(flops / self.peak(dtype), moved_bytes / self.bandwidth)


GB, TB, TERA = 1000**3, 1000**4, 1e12

PRESETS = {
    known.name: known
    for known in (
        Hardware(
            "A100-SXM-80GB",
            {"float32": 19.5 * TERA, "float16": 312 * TERA, "bfloat16": 312 * TERA},
            bandwidth=2.039 * TB,
            memory=80 * GB,
            source="NVIDIA A100 80GB Tensor Core GPU data sheet",
        ),
        Hardware(
            "H100-SXM",
            {
                "float32": 67 * TERA, "float16": 989 * TERA, "bfloat16": 989 * TERA,
                "float8_e4m3": 1979 * TERA,
            },
            bandwidth=3.35 * TB,
            memory=80 * GB,
            source="NVIDIA H100 Tensor Core GPU data sheet, halved where it counts sparsity",
        ),
        Hardware(
            "H200-SXM",
            {
                "float32": 67 * TERA, "float16": 989 * TERA, "bfloat16": 989 * TERA,
                "float8_e4m3": 1979 * TERA,
            },
            bandwidth=4.8 * TB,
            memory=141 * GB,
            source="NVIDIA H200 Tensor Core GPU data sheet, halved where it counts sparsity",
        ),
        Hardware(
            "RTX-4090",
            {"float32": 82.6 * TERA, "float16": 165.2 * TERA, "bfloat16": 165.2 * TERA},
            bandwidth=1.008 * TB,
            memory=24 * GB,
            source="NVIDIA Ada GPU architecture white paper, appendix A, 32-bit accumulation",
        ),
        Hardware(
            "MI300X",
            {
                "float32": 163.4 * TERA, "float16": 1307.4 * TERA, "bfloat16": 1307.4 * TERA,
                "float8_e4m3": 2614.9 * TERA,
            },
            bandwidth=5.3 * TB,
            memory=192 * GB,
            source="AMD Instinct MI300X accelerator data sheet",
        ),
    )
}  # fmt: skip
