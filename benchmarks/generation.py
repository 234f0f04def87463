"""How much faster a whole text comes with a KV cache than without, counted and timed.

Run it from the repository: ``python -m benchmarks.generation [--quick] [--reps N]``. It prints a
table and, as its last line, one JSON object. README.md in this folder says what each column means.

Knows: the two loops, alternation, medians, operations. Does not know: why time and operations
disagree.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.decode import TOLERANCE, Row, machine
from kvbook.accounting import step_flops
from kvbook.config import ModelConfig
from kvbook.generate import generate_cached, generate_naive
from kvbook.model.transformer import Transformer
from kvbook.model.weights import load_smollm2

Loop = Callable[[Transformer, list[list[int]], int], list[list[int]]]

REPS = 3

HEADER = (
    "                 seconds            naive / cached\n"
    "tokens     naive    cached        time   operations"
)
ROW = "{tokens:6} {naive_s:9.2f} {cached_s:9.3f}   {time_ratio:8.2f}x  {counted_ratio:10.2f}x"
SAMPLED = "   naive: every {every}th step timed, the others interpolated"


@dataclass(frozen=True)
class Case:
    """A text of ``tokens`` tokens, of which the first ``prompt`` are given.

    The naive loop is timed at every ``every``-th step and at the last. With 1, that is all of it.
    """

    tokens: int
    prompt: int = 16
    every: int = 1

    @property
    def fed(self) -> range:
        """Tokens that each step of the naive loop feeds: the prompt first, all but one last."""
        return range(self.prompt, self.tokens)

    @property
    def timed(self) -> list[int]:
        """Those of ``fed`` at which the naive loop is timed."""
        return sorted({*self.fed[:: self.every], self.fed[-1]})


# From 256 tokens on, the naive loop takes minutes, so it is timed at every 16th step.
FULL = [Case(64), Case(128), Case(256, every=16), Case(512, every=16)]
QUICK = FULL[:2]


def counted_ratio(config: ModelConfig, case: Case) -> float:
    """Operations of the naive loop over those of the cached one, logits at the last position."""
    naive = sum(step_flops(config, n, logits=1).total for n in case.fed)
    prefill = step_flops(config, case.prompt, logits=1).total
    decode = sum(step_flops(config, 1, past).total for past in case.fed[:-1])
    return naive / (prefill + decode)


def seconds(loop: Loop, model: Transformer, prompt: list[int], new: int) -> float:
    """Time in which a loop adds ``new`` tokens to a prompt, the making of its cache included."""
    start = time.perf_counter()
    loop(model, [prompt], new)
    return time.perf_counter() - start


def naive_seconds(model: Transformer, text: list[int], case: Case) -> float:
    """Time of the naive loop: measured as it is, or summed from a sample of its steps.

    Between two timed steps, time is taken to grow evenly with the tokens that are fed.
    """
    if case.every == 1:
        return seconds(generate_naive, model, text[: case.prompt], len(case.fed))
    taken = [seconds(generate_naive, model, text[:n], 1) for n in case.timed]
    return float(np.interp(case.fed, case.timed, taken).sum())


def cached_seconds(model: Transformer, text: list[int], case: Case) -> float:
    """Time of the cached loop, all of it."""
    return seconds(generate_cached, model, text[: case.prompt], len(case.fed))


def generate_checked(model: Transformer, case: Case) -> list[int]:
    """The text that both loops produce, (tokens,). Also the warm-up.

    Raises ``ValueError`` if the last logits of the cached loop are not those of the naive one.
    """
    prompt = torch.randint(0, model.config.vocab_size, (case.prompt,)).tolist()
    cache = model.new_cache(1, case.tokens)
    new = generate_cached(model, [prompt], len(case.fed), cache=cache)[0]
    text = [*prompt, *new]
    fed = torch.tensor([text[:-1]])
    cache.truncate(case.tokens - 2)
    cached = model(fed[:, -1:], cache, last_only=True).float()
    naive = model(fed, last_only=True).float()
    error = ((cached - naive).square().mean().sqrt() / naive.std()).item()
    allowed = TOLERANCE[model.dtype]
    if not error <= allowed:
        raise ValueError(
            f"at {case.tokens} tokens the logits of the cached and the naive loop differ by "
            f"{error:.2g} standard deviations, allowed are {allowed}; do not time loops that "
            "compute different things"
        )
    return text


@torch.inference_mode()
def measure(model: Transformer, case: Case, reps: int) -> Row:
    """Median times of one case. The two loops take turns in random order."""
    text = generate_checked(model, case)
    loops = {"naive": naive_seconds, "cached": cached_seconds}
    times: dict[str, list[float]] = {name: [] for name in loops}
    names, order = list(loops), random.Random(0)
    for _ in range(reps):
        order.shuffle(names)  # so that no one always runs in the other's wake
        for name in names:
            times[name].append(loops[name](model, text, case))
    pairs = zip(times["naive"], times["cached"], strict=True)
    return {
        "tokens": case.tokens,
        "naive_s": round(statistics.median(times["naive"]), 4),
        "cached_s": round(statistics.median(times["cached"]), 4),
        "time_ratio": round(statistics.median(naive / cached for naive, cached in pairs), 3),
        "counted_ratio": round(counted_ratio(model.config, case), 3),
        "sampled": case.every > 1,
    }


def run(model: Transformer, cases: Sequence[Case], reps: int) -> list[Row]:
    """Measure every case and print each row as it comes."""
    print(HEADER)
    rows = []
    for case in cases:
        row = measure(model, case, reps)
        note = SAMPLED.format(every=case.every) if row["sampled"] else ""
        print(ROW.format(**row) + note, flush=True)
        rows.append(row)
    return rows


def report(model: Transformer, cases: Sequence[Case], reps: int) -> None:
    """Print the table, and then everything as one JSON line."""
    torch.manual_seed(0)
    rows = run(model, cases, reps)
    print(json.dumps({"benchmark": "generation", "rows": rows, "machine": machine()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="64 and 128 tokens only")
    parser.add_argument("--reps", type=int, default=REPS, help="repetitions of each case")
    options = parser.parse_args()
    report(load_smollm2(torch.float32), QUICK if options.quick else FULL, options.reps)


if __name__ == "__main__":
    main()
