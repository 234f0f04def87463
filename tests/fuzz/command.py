"""The command: cases until the time is up, and the first that fails, shrunk."""

import argparse
import random
import textwrap
import traceback
from collections.abc import Iterator

import torch

from fuzz.kinds import KINDS
from fuzz.play import OPERATIONS, Failure, draw_case, fuzz_one
from fuzz.shrink import shrunk
from fuzz.tally import Tally

END = "# ---- where it failed"


def kinds_in_turn(seed: int) -> Iterator[tuple[str, str]]:
    """All of them once in random order, and again."""
    rnd = random.Random(f"kinds {seed}")
    while True:
        yield from rnd.sample(KINDS, len(KINDS))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=30, help="of one case")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tally = Tally()
    for number, kind in enumerate(kinds_in_turn(given.seed)):
        if tally.seconds > given.seconds:
            break
        seed = 1_000_000 * given.seed + number
        failure = fuzz_one(draw_case(seed, kind), seed, given.operations, tally)
        if failure is not None:
            report(failure, shrunk(failure), given.seed, tally)
            return 1
    print("\n".join(tally.lines(OPERATIONS)))
    return 0


def report(failure: Failure, small: Failure, seed: int, tally: Tally) -> None:
    """What went wrong, and a test that fails for it."""
    before, after = len(failure.case.ops), len(small.case.ops)
    print(f"seed {seed}, after {tally.operations.total():,} operations: {failure.difference}")
    print(f"shrunk from {before} to {after} operations; a test of it:\n")
    print("from fuzz.case import Case, Op\nfrom fuzz.play import replay")
    print("from kvbook.config import LatentConfig, RopeScaling\n\n")
    print("def test_found_by_the_fuzz() -> None:")
    print(textwrap.indent(f"replay({small.case})", "    "))
    print(f"\n{END}\n{''.join(traceback.format_exception(small.error, limit=-3))}")
    print(small.difference)
