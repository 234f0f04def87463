"""``kvbook probe``: the peaks of this machine.

Knows: how they are printed, what to install for them. Does not know: how they are measured.
"""

import argparse
import json
from dataclasses import asdict


def run_probe(options: argparse.Namespace) -> None:
    try:  # here, so that the other commands start without torch
        from kvbook.measure import probe
    except ModuleNotFoundError as error:
        raise ValueError(
            f"measuring needs {error.name}, which is not installed; install it with: "
            f"python -m pip install {error.name}"
        ) from error

    machine = probe()
    if options.json:
        print(json.dumps(asdict(machine), indent=1))
        return
    print(f"{machine.name}\n")
    print(f"{'memory bandwidth':<18}{machine.bandwidth / 1e9:>12,.1f} GB/s")
    for dtype, peak in machine.peak_flops.items():
        print(
            f"{dtype:<18}{peak / 1e9:>12,.1f} GFLOP/s   memory is the limit below "
            f"{machine.ridge(dtype):,.1f} FLOP per byte"
        )
    facts = [f"{name} {fact}" for name, fact in machine.provenance.items() if is_plain(fact)]
    print(f"\n{machine.source}: {', '.join(facts)}")


def is_plain(fact: object) -> bool:
    """Whether a fact fits into a line."""
    return isinstance(fact, str | int | float)
