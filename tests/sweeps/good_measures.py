"""Right calls of what measures and draws; with them the tables of ``good_calls`` are whole."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

import kvbook
from kvbook import measure, plots
from kvbook.accounting import Hardware
from sweeps import good_drafts as good_drafts  # its calls join the table
from sweeps import good_sizes as good_sizes
from sweeps.good_calls import (
    GOOD,
    MODEL,
    good,
    simple,
    ticking,
)
from sweeps.wrong_values import Good

__all__ = ["GOOD"]


# ---- Measuring

HARDWARE = Hardware(
    "made up", {"float32": 1e15}, 1e15, None, "a test",
    {"device": "made up", "device_type": "cpu", "threads": 2, "torch": "2", "date": "2025-01-31"},
)  # fmt: skip
STEP = measure.StepTiming(1, 10, 2, "float32", 197_120, 200_064, 0.5, (0.25, 0.75))


def work() -> Tensor:
    return torch.ones(2) + 1


simple("count_bytes", kvbook.count_bytes, run=work, groups={"x": [torch.ones(2)]})
simple("count_flops", kvbook.count_flops, run=work)
simple("clock_for", measure.clock_for, device="cpu")
simple("last_level_cache", measure.last_level_cache, device="cpu")
simple("provenance", measure.provenance, device="cpu")
simple("format_seconds", measure.format_seconds, seconds=0.1)
simple("filled_cache", measure.filled_cache, model=MODEL, batch=1, length=2, capacity=4)
simple("model_groups", measure.model_groups, model=MODEL, cache=None)
simple("count_traffic", measure.count_traffic, count=kvbook.count_bytes(work))


@good("measure")
def _() -> Good:
    arguments = {
        "fn": work, "before": work, "warmup": 0, "repetitions": 1, "least_seconds": 0.0,
        "device": "cpu", "clock": ticking(), "working_set": 1, "bound": None, "tolerance": 0.0,
    }  # fmt: skip
    return Good(measure.measure, arguments)


@good("compare")
def _() -> Good:
    arguments = {
        "fns": {"a": work}, "before": work, "warmup": 0, "repetitions": 1, "least_seconds": 0.0,
        "device": "cpu", "clock": ticking(),
    }  # fmt: skip
    return Good(measure.compare, arguments)


@good("measure_generation")
def _() -> Good:
    arguments = {
        "start": lambda: iter([1, 2]), "prompt_lengths": [3], "warmup": 0, "repetitions": 1,
        "device": "cpu", "clock": ticking(), "prefix": None,
    }  # fmt: skip
    return Good(measure.measure_generation, arguments)


@good("measure_step")
def _() -> Good:
    arguments = {
        "model": MODEL, "T": 1, "S": 2, "batch": 1, "repetitions": 1, "clock": ticking()
    }
    return Good(measure.measure_step, arguments)


@good("probe")
def _() -> Good:
    arguments = {
        "device": "cpu", "dtypes": ["float32"], "clock": ticking(), "stream_bytes": 4,
        "seconds_per_product": 0.0,
    }  # fmt: skip
    return Good(measure.probe, arguments)


@good("save_record")
def _() -> Good:
    file = Path(tempfile.mkdtemp(prefix="kvbook-sweep-")) / "r.json"
    arguments = {"path": file, "hardware": HARDWARE, "model": "toy", "steps": [STEP]}
    return Good(measure.save_record, arguments, file.exists)


@good("load_record")
def _() -> Good:
    return Good(measure.load_record, {"path": next(measure.record.SHIPPED.glob("*.json"))})


@good("load_records")
def _() -> Good:
    return Good(measure.load_records, {"folder": measure.record.SHIPPED})


# ---- Figures


@good("roofline")
def _() -> Good:
    from matplotlib.figure import Figure

    ax = Figure().add_subplot()
    arguments = {
        "ax": ax, "machine": HARDWARE, "colors": {"float32": "k"}, "low": 0.1, "high": 1e4
    }
    return Good(plots.roofline, arguments, lambda: len(ax.lines))


@good("label_end")
def _() -> Good:
    from matplotlib.figure import Figure

    ax = Figure().add_subplot()
    arguments = {"ax": ax, "x": 1.0, "y": 2.0, "text": "a", "color": "k"}
    return Good(plots.label_end, arguments, lambda: len(ax.texts))
