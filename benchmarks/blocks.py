"""How fast the block pool and the prefix cache are, beside a peer and the least that is possible.

Run it from the repository: ``python -m benchmarks.blocks [--quick] [--reps N]``. It prints a table
and, as its last line, one JSON object. README.md in this folder says what each column means.

Knows: cases, floors, the peer's algorithm, alternation, medians. Does not know: tensors.
"""

import argparse
import gc
import hashlib
import itertools
import json
import random
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

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
    "           blocks    blocks     thousand blocks/s     kvbook's speed, divided by\n"
    "case     per call    cached     kvbook      peer      the peer's the floor's"
)
ROW = (
    "{case:8} {per_call:8}  {cached:8}  {kvbook:9.0f} {peer:9.0f}  "
    "{ratio:14.2f} {floor_share:11.2f}"
)

Prompts = list[list[int]]
Work = Callable[[], None]
Contenders = dict[str, Work]


@dataclass(frozen=True)
class Case:
    """``lend``: allocate and release. ``fill``: prompts that nobody has seen. ``find``: seen ones.

    One repetition moves ``blocks`` blocks, ``per_call`` at a time; ``cached`` blocks are there.
    """

    name: str
    blocks: int
    per_call: int
    cached: int = 0


FULL = [
    Case("lend", 100_000, 1),
    Case("lend", 100_000, 16),
    Case("fill", 12_800, PROMPT_BLOCKS, POOL),
    *(Case("find", 12_800, PROMPT_BLOCKS, cached) for cached in (1_024, 10_240, 102_400)),
]
QUICK = [replace(case, blocks=case.blocks // 10) for case in FULL[:-1]]


def new_prompts(count: int, draw: random.Random) -> Prompts:
    """Random prompts of PROMPT_BLOCKS full blocks."""
    return [draw.choices(range(VOCABULARY), k=PROMPT_BLOCKS * BLOCK_SIZE) for _ in range(count)]


def serve(prefix: PrefixCache, prompts: Iterable[list[int]], found: int, salt: int = 0) -> None:
    """Each prompt from begin to end. ``ValueError`` if one finds other than ``found`` tokens."""
    identity = Identity(salt=salt)
    for prompt in prompts:
        sequence = prefix.begin(prompt, identity)
        if sequence.cached_tokens != found:
            raise ValueError(
                f"{sequence.cached_tokens} tokens were found, expected are {found}; do not time "
                "a cache that does other work than the case names"
            )
        prefix.commit(sequence, len(prompt))
        prefix.end(sequence)


class Peer:
    """The algorithm of nano-vllm's block manager, written anew, with its names for the steps.

    https://github.com/GeeeekExplorer/nano-vllm, nanovllm/engine/block_manager.py, April 2026. A
    block's key is a 64-bit hash of the key before it and the block's tokens, which numpy turns
    into bytes block by block. A block that is found is used if it holds the same tokens; what
    came before it is not compared. A prompt is hashed once to count what is found, and what was
    found a second time to take it. Blocks are reused in the order in which they were let go.
    """

    def __init__(self, blocks: int) -> None:
        self.owners = [0] * blocks
        self.keys: list[int | None] = [None] * blocks
        self.tokens: list[list[int]] = [[] for _ in range(blocks)]
        self.by_key: dict[int, int] = {}
        self.unused = deque(range(blocks))
        self.used: set[int] = set()

    def can_allocate(self, prompt: list[int]) -> int:
        """How many blocks of a prompt are found, its last one in no case; or -1: no room."""
        key, found, needed = None, 0, -(-len(prompt) // BLOCK_SIZE)
        new = needed
        for place in range(needed - 1):
            tokens = part(prompt, place)
            key = key_of(tokens, key)
            block = self.by_key.get(key)
            if block is None or self.tokens[block] != tokens:
                break
            found += 1
            new -= block in self.used
        return found if new <= len(self.unused) else -1

    def allocate(self, prompt: list[int], found: int) -> list[int]:
        """The block table."""
        key, table = None, []
        for place in range(found):
            key = key_of(part(prompt, place), key)
            block = self.by_key[key]
            if block not in self.used:
                self.unused.remove(block)
                self.used.add(block)
            self.owners[block] += 1
            table.append(block)
        return table + self.new_blocks(-(-len(prompt) // BLOCK_SIZE) - found)

    def new_blocks(self, n: int) -> list[int]:
        taken = []
        for _ in range(n):
            block = self.unused.popleft()
            old = self.keys[block]
            if old is not None and self.by_key.get(old) == block:
                del self.by_key[old]
            self.owners[block], self.keys[block], self.tokens[block] = 1, None, []
            self.used.add(block)
            taken.append(block)
        return taken

    def hash_blocks(self, prompt: list[int], table: list[int], found: int) -> None:
        """Everything is computed: the full blocks can be found from now on."""
        key = self.keys[table[found - 1]] if found else None
        for place in range(found, len(prompt) // BLOCK_SIZE):
            block, tokens = table[place], part(prompt, place)
            key = key_of(tokens, key)
            self.keys[block], self.tokens[block] = key, tokens
            self.by_key[key] = block

    def deallocate(self, table: list[int]) -> None:
        for block in reversed(table):
            self.owners[block] -= 1
            if not self.owners[block]:
                self.used.remove(block)
                self.unused.append(block)


def part(prompt: list[int], place: int) -> list[int]:
    """The tokens of one block."""
    return prompt[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]


def key_of(tokens: list[int], before: int | None) -> int:
    message = np.array(tokens).tobytes()
    return hash64(message if before is None else before.to_bytes(8, "little") + message)


def blake2b(message: bytes) -> int:
    """64 bits, where xxhash is not installed."""
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")


try:
    from xxhash import xxh64_intdigest as hash64
except ModuleNotFoundError:
    hash64 = blake2b
PEER_HASH = "blake2b" if hash64 is blake2b else "xxh64"


def serve_by_peer(peer: Peer, prompts: Iterable[list[int]], found: int) -> None:
    """As ``serve``."""
    for prompt in prompts:
        blocks = peer.can_allocate(prompt)
        if blocks * BLOCK_SIZE != found:
            raise ValueError(
                f"the peer found {blocks} blocks, expected are {found // BLOCK_SIZE}; do not time "
                "a cache that does other work than the case names"
            )
        table = peer.allocate(prompt, blocks)
        peer.hash_blocks(prompt, table, blocks)
        peer.deallocate(table)


def digest_all(prompts: Iterable[list[int]]) -> None:
    """What no prefix cache with SHA-256 can do without: a digest per block, and a dict."""
    seen: dict[bytes, int] = {}
    for prompt in prompts:
        running, tokens = hashlib.sha256(), struct.pack(f"{len(prompt)}q", *prompt)
        width = BLOCK_SIZE * 8  # bytes
        for start in range(0, PROMPT_BLOCKS * width, width):
            running.update(tokens[start : start + width])
            seen[running.digest()] = start


def lend(case: Case) -> Contenders:
    """The pool; the peer's; and a bare stack of numbers: no owners, no checks, nothing kept."""
    pool, peer, stack = BlockPool(POOL, BLOCK_SIZE), Peer(POOL), list(range(POOL))
    calls, n = range(case.blocks // case.per_call), case.per_call

    def kvbook() -> None:
        for _ in calls:
            pool.release(pool.allocate(n))

    def by_peer() -> None:
        for _ in calls:
            peer.deallocate(peer.new_blocks(n))

    def floor() -> None:
        for _ in calls:
            taken = [stack.pop() for _ in range(n)]
            for block in taken:
                stack.append(block)

    return {"kvbook": kvbook, "peer": by_peer, "floor": floor}


def fill(case: Case) -> Contenders:
    """New prompts through a full cache, so that each block evicts another; and digests.

    The peer has no salts, so its prompts begin with another number instead.
    """
    prefix, peer = PrefixCache(BlockPool(case.cached, BLOCK_SIZE), "benchmark"), Peer(case.cached)
    draw = random.Random(0)
    before = new_prompts(case.cached // PROMPT_BLOCKS, draw)
    serve(prefix, before, found=0)
    serve_by_peer(peer, before, found=0)
    prompts = new_prompts(case.blocks // PROMPT_BLOCKS, draw)
    salts = itertools.count(1)  # under another salt, the same tokens are a new prompt
    firsts = itertools.count(VOCABULARY)

    def by_peer() -> None:
        first = next(firsts)
        for prompt in prompts:
            prompt[0] = first
        serve_by_peer(peer, prompts, found=0)

    return {
        "kvbook": lambda: serve(prefix, prompts, 0, next(salts)),
        "peer": by_peer,
        "floor": lambda: digest_all(prompts),
    }


def find(case: Case) -> Contenders:
    """Cached prompts, with one more token; and digests.

    The prompts come in the same order again and again. So the block that the one more token takes
    is never one that the peer needs next: unlike ours, it does not prefer blocks that hold nothing.
    """
    cached = new_prompts(case.cached // PROMPT_BLOCKS, random.Random(0))
    blocks, prompts = case.cached + len(cached), [[*prompt, 0] for prompt in cached]
    prefix, peer = PrefixCache(BlockPool(blocks, BLOCK_SIZE), "benchmark"), Peer(blocks)
    serve(prefix, cached, found=0)
    serve_by_peer(peer, cached, found=0)
    found, n = PROMPT_BLOCKS * BLOCK_SIZE, case.blocks // PROMPT_BLOCKS
    serve(prefix, prompts, found)  # once around: the peer's blocks lie in the order of the prompts
    serve_by_peer(peer, prompts, found)
    ours, theirs, floors = (itertools.cycle(prompts) for _ in range(3))
    return {
        "kvbook": lambda: serve(prefix, itertools.islice(ours, n), found),
        "peer": lambda: serve_by_peer(peer, itertools.islice(theirs, n), found),
        "floor": lambda: digest_all(itertools.islice(floors, n)),
    }


WORK = {"lend": lend, "fill": fill, "find": find}


def seconds(work: Work) -> float:
    """Processor time: one thread that waits for nothing, whatever else the machine does."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(case: Case, reps: int) -> Row:
    """Median speeds of one case. kvbook, the peer and the floor take turns in random order."""
    work = WORK[case.name](case)
    times: dict[str, list[float]] = {name: [] for name in work}
    names, order = list(work), random.Random(0)
    for name in names:
        seconds(work[name])  # the warm-up
    for _ in range(reps):
        order.shuffle(names)  # so that no one always runs in another's wake
        for name in names:
            times[name].append(seconds(work[name]))

    def speed_over(other: str) -> float:
        pairs = zip(times["kvbook"], times[other], strict=True)
        return round(statistics.median(theirs / ours for ours, theirs in pairs), 3)

    return {
        "case": case.name,
        "per_call": case.per_call,
        "cached": case.cached,
        "kvbook_blocks_s": round(case.blocks / statistics.median(times["kvbook"])),
        "peer_blocks_s": round(case.blocks / statistics.median(times["peer"])),
        "ratio": speed_over("peer"),
        "floor_share": speed_over("floor"),
    }


def run(cases: Sequence[Case], reps: int) -> list[Row]:
    """Measure every case and print each row as it comes."""
    print(f"The peer hashes with {PEER_HASH}.\n{HEADER}")
    rows = []
    for case in cases:
        row = measure(case, reps)
        speeds = {name: row[f"{name}_blocks_s"] / 1000 for name in ("kvbook", "peer")}
        print(ROW.format(**speeds, **row), flush=True)
        rows.append(row)
    return rows


def report(cases: Sequence[Case], reps: int) -> None:
    """Print the table, and then everything as one JSON line."""
    gc.disable()  # as timeit does: when it runs depends on what else is in memory
    rows = run(cases, reps)
    gc.enable()
    result = {"benchmark": "blocks", "peer_hash": PEER_HASH, "rows": rows, "machine": machine()}
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks, 3 repetitions")
    parser.add_argument("--reps", type=int, help="repetitions of each case")
    options = parser.parse_args()
    reps = options.reps or (3 if options.quick else REPS)
    report(QUICK if options.quick else FULL, reps)


if __name__ == "__main__":
    main()
