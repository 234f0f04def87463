"""The command: cases until the time is up, and the first that fails, shrunk."""

import argparse
import random
import traceback
from collections.abc import Iterator

import torch

from fuzz.kinds import KINDS
from fuzz.play import OPERATIONS, Failure, draw_case, fuzz_one
from fuzz.shrink import shrunk
from fuzz.tally import Tally


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
            report(failure, given.seed, tally)
            return 1
    print("\n".join(tally.lines(OPERATIONS)))
    return 0


def report(failure: Failure, seed: int, tally: Tally) -> None:
    found = shrunk(failure)
    print(f"seed {seed}, after {tally.operations.total():,} operations: {failure.difference}")
    print(f"shrunk from {len(failure.case.ops)} to {len(found.case.ops)} operations:\n")
    print("from fuzz.case import Case, Op\nfrom fuzz.play import replay\n\n")
    print(f"def test_found_by_the_fuzz() -> None:\n    replay({indented(str(found.case))})\n")
    traceback.print_exception(found.error, limit=-3)
    print(f"\n{found.difference}")


def indented(text: str) -> str:
    return text.replace("\n", "\n    ")
