"""How fast the block pool and the prefix cache are, beside the least that the same work can cost.

Run it from the repository: ``python -m benchmarks.blocks [--quick] [--reps N]``. It prints a table
and, as its last line, one JSON object. README.md in this folder says what each column means.

Knows: cases, floors, alternation, medians. Does not know: tensors.
"""

import argparse
import gc
import hashlib
import itertools
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.decode import Row, machine
from kvbook.cache.block_key import Identity
from kvbook.cache.blocks import BlockPool
from kvbook.cache.prefix import PrefixCache

BLOCK_SIZE = 16  # tokens
PROMPT_BLOCKS = 64
POOL = 4096  # blocks
VOCABULARY = 50_000
REPS = 15

HEADER = (
    "           blocks    blocks     thousand blocks/s        kvbook's share\n"
    "case     per call    cached     kvbook       aim         of the floor"
)
ROW = "{case:8} {per_call:8}  {cached:8}  {thousands:9.0f}  {aim:>8}  {floor_share:19.2f}"

Prompts = list[list[int]]
Work = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """``lend``: allocate and release. ``fill``: prompts that nobody has seen. ``find``: seen ones.

    One repetition moves ``blocks`` blocks, ``per_call`` at a time; ``cached`` blocks are there.
    """

    name: str
    blocks: int
    per_call: int
    cached: int = 0
    aim: int | None = None  # blocks per second, on one core of a current machine


FULL = [
    Case("lend", 100_000, 1, aim=1_500_000),
    Case("lend", 100_000, 16, aim=1_500_000),
    Case("fill", 12_800, PROMPT_BLOCKS, POOL, aim=350_000),
    *(Case("find", 12_800, PROMPT_BLOCKS, cached) for cached in (1_024, 10_240, 102_400)),
]
QUICK = [replace(case, blocks=case.blocks // 10) for case in FULL[:-1]]


def new_prompts(count: int, draw: random.Random) -> Prompts:
    """Random prompts of PROMPT_BLOCKS full blocks."""
    return [draw.choices(range(VOCABULARY), k=PROMPT_BLOCKS * BLOCK_SIZE) for _ in range(count)]


def serve(prefix: PrefixCache, prompts: Prompts, found: int, salt: int = 0) -> None:
    """Each prompt from begin to end. ``ValueError`` if one finds other than ``found`` tokens."""
    for prompt in prompts:
        sequence = prefix.begin(prompt, Identity(salt=salt))
        if sequence.cached_tokens != found:
            raise ValueError(
                f"{sequence.cached_tokens} tokens were found, expected are {found}; do not time "
                "a cache that does other work than the case names"
            )
        prefix.commit(sequence, len(prompt))
        prefix.end(sequence)


def digest_all(prompts: Prompts) -> None:
    """What no prefix cache with SHA-256 can do without: a digest per block, and a dict."""
    seen: dict[bytes, int] = {}
    for prompt in prompts:
        key, tokens = b"", array("q", prompt).tobytes()
        width = BLOCK_SIZE * 8  # bytes
        for start in range(0, PROMPT_BLOCKS * width, width):
            key = hashlib.sha256(key + tokens[start : start + width]).digest()
            seen[key] = start


def lend(case: Case) -> tuple[Work, Work]:
    """The pool, and a bare stack of numbers: no owners, no checks, nothing kept."""
    pool, stack = BlockPool(POOL, BLOCK_SIZE), list(range(POOL))
    calls, n = range(case.blocks // case.per_call), case.per_call

    def kvbook() -> None:
        for _ in calls:
            pool.release(pool.allocate(n))

    def floor() -> None:
        for _ in calls:
            taken = [stack.pop() for _ in range(n)]
            for block in taken:
                stack.append(block)

    return kvbook, floor


def fill(case: Case) -> tuple[Work, Work]:
    """New prompts through a full cache, so that each block evicts another; and digests."""
    prefix, draw = PrefixCache(BlockPool(case.cached, BLOCK_SIZE), "benchmark"), random.Random(0)
    serve(prefix, new_prompts(case.cached // PROMPT_BLOCKS, draw), found=0)
    prompts = new_prompts(case.blocks // PROMPT_BLOCKS, draw)
    salts = itertools.count(1)  # under another salt, the same tokens are a new prompt
    return lambda: serve(prefix, prompts, 0, next(salts)), lambda: digest_all(prompts)


def find(case: Case) -> tuple[Work, Work]:
    """Cached prompts, with one more token; and digests."""
    pool = BlockPool(case.cached + 1, BLOCK_SIZE)
    prefix, draw = PrefixCache(pool, "benchmark"), random.Random(0)
    cached = new_prompts(case.cached // PROMPT_BLOCKS, draw)
    serve(prefix, cached, found=0)
    prompts = [[*prompt, 0] for prompt in draw.choices(cached, k=case.blocks // PROMPT_BLOCKS)]
    found = PROMPT_BLOCKS * BLOCK_SIZE
    return lambda: serve(prefix, prompts, found), lambda: digest_all(prompts)


WORK = {"lend": lend, "fill": fill, "find": find}


def seconds(work: Work) -> float:
    """Processor time: one thread that waits for nothing, whatever else the machine does."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(case: Case, reps: int) -> Row:
    """Median speeds of one case. kvbook and the floor take turns in random order."""
    kvbook, floor = WORK[case.name](case)
    work = {"kvbook": kvbook, "floor": floor}
    times: dict[str, list[float]] = {name: [] for name in work}
    names, order = list(work), random.Random(0)
    for name in names:
        seconds(work[name])  # the warm-up
    for _ in range(reps):
        order.shuffle(names)  # so that no one always runs in the other's wake
        for name in names:
            times[name].append(seconds(work[name]))
    pairs = zip(times["kvbook"], times["floor"], strict=True)
    return {
        "case": case.name,
        "per_call": case.per_call,
        "cached": case.cached,
        "kvbook_blocks_s": round(case.blocks / statistics.median(times["kvbook"])),
        "aim_blocks_s": case.aim,
        "floor_share": round(statistics.median(floor / kvbook for kvbook, floor in pairs), 3),
    }


def run(cases: Sequence[Case], reps: int) -> list[Row]:
    """Measure every case and print each row as it comes."""
    print(HEADER)
    rows = []
    for case in cases:
        row = measure(case, reps)
        aim = f"{case.aim / 1000:.0f}" if case.aim else "-"
        print(ROW.format(thousands=row["kvbook_blocks_s"] / 1000, aim=aim, **row), flush=True)
        rows.append(row)
    return rows


def report(cases: Sequence[Case], reps: int) -> None:
    """Print the table, and then everything as one JSON line."""
    gc.disable()  # as timeit does: when it runs depends on what else is in memory
    rows = run(cases, reps)
    gc.enable()
    print(json.dumps({"benchmark": "blocks", "rows": rows, "machine": machine()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks, 3 repetitions")
    parser.add_argument("--reps", type=int, help="repetitions of each case")
    options = parser.parse_args()
    reps = options.reps or (3 if options.quick else REPS)
    report(QUICK if options.quick else FULL, reps)


if __name__ == "__main__":
    main()
