"""Measure this machine and write what it can do to a file.

    python -m kvbook.measure --out FILE.json

Knows: arguments, which steps are worth a point. Does not know: how anything is measured.

The model has the shape of SmolLM2-135M and random weights: its speed is that of the real one, and
nothing has to be fetched.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from kvbook.accounting.hardware import Hardware
from kvbook.accounting.units import check_count
from kvbook.config import ModelConfig
from kvbook.measure.clock import default_device
from kvbook.measure.peaks import DTYPES, higher_peaks, probe
from kvbook.measure.record import save_record
from kvbook.measure.steps import StepTiming, measure_step
from kvbook.measure.timing import format_seconds
from kvbook.model.target import usable_device
from kvbook.model.transformer import Transformer

SHAPE_OF = "SmolLM2-135M, random weights"
SMOLLM2 = ModelConfig(
    vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_mlp=1536,
    max_positions=8192,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbook.measure",
        description="Measure bandwidth, matrix products and single steps of a small model.",
    )
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument("--device", help="such as cpu or cuda (the accelerator, if there is one)")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), help="of the products")
    parser.add_argument(
        "--step-dtypes", nargs="*", default=["float32", "bfloat16"],
        help="of the model; none: peaks only",
    )  # fmt: skip
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="rows")
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=[512, 2048], help="tokens, at most 8191"
    )
    options = parser.parse_args(arguments)
    try:
        check_options(options)
        device = find_device(options.device)
        hardware = probe(device, options.dtypes)
        show_peaks(hardware)
        timed = list(steps(options, device))
        if timed:  # while they ran, the machine may have become faster than it was before
            hardware = higher_peaks(hardware, probe(device, options.dtypes))
        save_record(options.out, hardware, SHAPE_OF if timed else "", timed)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"written to {options.out}")
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Refuse before the first measurement what would fail after it."""
    out = Path(options.out)
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out must be a file in a folder that exists, got {options.out!r}")
    for batch in options.batches:
        check_count("--batches", batch)
    for context in options.contexts:
        check_count("--contexts", context, 1, SMOLLM2.max_positions - 1)
    for name in options.step_dtypes:
        if name not in DTYPES:
            raise ValueError(f"--step-dtypes must be among {', '.join(DTYPES)}, got {name!r}")


def find_device(name: str | None) -> torch.device:
    return default_device() if name is None else usable_device(name, "--device")


def steps(options: argparse.Namespace, device: torch.device) -> Iterator[StepTiming]:
    """For each dtype and batch: prefill of the shortest context, decode after every one."""
    for name in options.step_dtypes:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Transformer(SMOLLM2, getattr(torch, name), device)
        for batch in options.batches:
            points = [(min(options.contexts), 0), *((1, S) for S in options.contexts)]
            for T, S in points:
                step = measure_step(model, T, S, batch)
                print(
                    f"{name:9} batch {batch:3}  T {T:5}  S {S:5}  "
                    f"{format_seconds(step.seconds):>8}  {step.tokens_per_second:12,.1f} tokens/s",
                    flush=True,
                )
                yield step


def show_peaks(hardware: Hardware) -> None:
    print(f"{hardware.name}: {hardware.bandwidth / 1e9:.1f} GB/s", end="")
    print(*(f", {name} {peak / 1e9:,.1f} GFLOP/s" for name, peak in hardware.peak_flops.items()),
          sep="")  # fmt: skip
    print(json.dumps(hardware.provenance))


if __name__ == "__main__":
    sys.exit(main())
