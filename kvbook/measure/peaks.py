"""What this machine can do at most: bytes and products per second, measured.

Knows: three ways to stream memory, square matrix products of growing size, the fastest of each.
Does not know: models, data sheets.

A peak is the best of all repetitions, not the median: a roof that a later run could exceed is no
roof. It is what PyTorch reached here with these threads, not what the hardware is sold as.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvbook.accounting.formats import parse_format
from kvbook.accounting.hardware import Hardware
from kvbook.accounting.units import check_count
from kvbook.measure.clock import Clock, check_clock, chosen_device, clock_for
from kvbook.measure.machine import last_level_cache, memory_of, provenance
from kvbook.measure.timing import measure
from kvbook.model.arguments import check_number

DTYPES = ("float64", "float32", "float16", "bfloat16")
LEAST_STREAM = 256 * 1024**2  # bytes, where the cache is small or its size is not known
SMALLEST, LARGEST = 256, 16384  # rows of the matrices
REPETITIONS = 7
MOST_SECONDS = 60.0  # for one product: it runs eight times or so


def probe(
    device: torch.device | str | None = None,
    dtypes: Sequence[str] = DTYPES,
    *,
    clock: Clock | None = None,
    stream_bytes: int | None = None,
    seconds_per_product: float = 0.2,
) -> Hardware:
    """Measure memory bandwidth and the matrix-product rate of each dtype, in a few seconds.

    ``stream_bytes`` is the size of one buffer (there are two), unless given the larger of four
    last-level caches and 256 MiB. Matrices double from 256 rows on until the next size would take
    more than ``seconds_per_product``. Memory for both is needed.

    Returns a ``Hardware`` whose provenance names the device, threads, versions, the date, and
    every rate that entered. Raises ``ValueError`` for a dtype that the device does not multiply.
    """
    device = chosen_device(device)
    clock = clock_for(device) if clock is None else clock
    check_clock(clock)
    if isinstance(dtypes, str) or not isinstance(dtypes, Sequence) or not dtypes:
        raise ValueError(
            f"dtypes must name at least one of {', '.join(DTYPES)}, got {dtypes!r:.80}"
        )
    names = [parse_format(dtype).name for dtype in dtypes]
    check_number("seconds_per_product", seconds_per_product, 0, MOST_SECONDS)
    if stream_bytes is None:
        stream_bytes = max(4 * (last_level_cache(device) or 0), LEAST_STREAM)
    memory = memory_of(device)
    most = None if memory is None else memory // 2
    streams = stream_rates(device, clock, check_count("stream_bytes", stream_bytes, 4, most))
    products = {
        name: product_rates(device, clock, name, seconds_per_product) for name in names
    }
    facts = provenance(device)
    return Hardware(
        name=facts["device"],
        peak_flops={name: max(rates.values()) for name, rates in products.items()},
        bandwidth=max(streams.values()),
        memory=memory,
        source="measured with kvbook.measure.probe",
        provenance={
            **facts,
            "clock": clock.name,
            "stream_buffer_bytes": stream_bytes,
            "bytes_per_second": streams,
            "flops_per_second_by_rows": {
                name: {str(n): rate for n, rate in rates.items()}
                for name, rates in products.items()
            },
        },
    )


def higher_peaks(first: Hardware, second: Hardware) -> Hardware:
    """The higher rate of two probes of one machine: what it has done once, it can do.

    Facts are those of the first probe; the rates of the second stand beside them.
    """
    rates = ("bytes_per_second", "flops_per_second_by_rows")
    again = {name: second.provenance[name] for name in rates if name in second.provenance}
    return replace(
        first,
        peak_flops={
            dtype: max(peak, second.peak(dtype)) for dtype, peak in first.peak_flops.items()
        },
        bandwidth=max(first.bandwidth, second.bandwidth),
        provenance={**first.provenance, "second_probe": again},
    )


def stream_rates(device: torch.device, clock: Clock, size: int) -> dict[str, float]:
    """Bytes per second of three patterns over float32 buffers of ``size`` bytes."""
    x = torch.ones(size // 4, device=device)
    y = torch.ones(size // 4, device=device)
    # The pattern, and how many of x's sizes it moves by the convention of kvbook.measure.bytes.
    patterns: dict[str, tuple[Callable[[], Any], int]] = {
        "read": (x.sum, 1),
        "copy": (lambda: y.copy_(x), 2),
        "update": (lambda: y.add_(x), 3),
    }
    return {
        name: moved * x.nbytes / _best(run, clock, device)
        for name, (run, moved) in patterns.items()
    }


def product_rates(
    device: torch.device, clock: Clock, dtype: str, budget: float
) -> dict[int, float]:
    """Operations per second of an n × n by n × n product, for n = 256, 512, …"""
    rates: dict[int, float] = {}
    n, seconds = SMALLEST, 0.0
    while not rates or (8 * seconds <= budget and n <= LARGEST):  # twice the rows, 8 times the work
        left, right, out = _matrices(n, dtype, device)
        seconds = _best(partial(torch.mm, left, right, out=out), clock, device)
        rates[n] = 2 * n**3 / seconds
        n *= 2
    return rates


def _matrices(n: int, dtype: str, device: torch.device) -> list[torch.Tensor]:
    """Two factors and a place for the product. Random: constant data lets some chips run faster."""
    generator = torch.Generator(device).manual_seed(0)
    try:
        made = [
            torch.randn(n, n, device=device, generator=generator).to(getattr(torch, dtype))
            for _ in range(3)
        ]
        torch.mm(made[0], made[1], out=made[2])
    except (AttributeError, TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{device.type} does not multiply {dtype} matrices ({reason:.120}); "
            "leave it out of dtypes"
        ) from error
    return made


def _best(run: Callable[[], Any], clock: Clock, device: torch.device) -> float:
    return measure(
        run, repetitions=REPETITIONS, least_seconds=0, clock=clock, device=device
    ).best
