"""How fast text comes: the first token, and each one after it.

Knows: the moments at which tokens come out of a stream, how many prompt tokens a prefix cache
found. Does not know: models, keys and values, what the stream does between two tokens.

TTFT, time to first token: from the call to the first token; it holds the prefill. TPOT, time per
output token: the rest of the time over the rest of the tokens. A prefill of 0.5 s and 16 tokens
that end at 2.0 s make a TPOT of 1.5 s / 15 = 0.1 s; dividing 2.0 s by 16 would charge the prefill
to every token.

What a prefix cache finds is not computed, so it is no part of a prefill rate: 1,000 prompt tokens
of which 992 are found, with a first token after 0.01 s, are 800 tokens per second, not 100,000.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from kvbook.accounting.units import check_count
from kvbook.cache import PrefixCache
from kvbook.cache.prefix import PrefixStats
from kvbook.measure.clock import Clock, check_clock, chosen_device, clock_for
from kvbook.measure.timing import MOST_REPETITIONS
from kvbook.model.arguments import check_function, check_is


@dataclass(frozen=True)
class GenerationTiming:
    """``token_seconds[run][i]`` is when token i of every row was out, since the run began."""

    prompt_lengths: tuple[int, ...]  # tokens of each row's prompt, padding not counted
    token_seconds: tuple[tuple[float, ...], ...]
    clock: str
    found_tokens: tuple[int, ...] = ()  # per run, of all prompts; () where no prefix cache is used

    @property
    def computed_tokens(self) -> tuple[int, ...]:
        """Prompt tokens that each run computed: those of all rows, without what was found."""
        found = self.found_tokens or (0,) * len(self.token_seconds)
        return tuple(sum(self.prompt_lengths) - tokens for tokens in found)

    @property
    def batch(self) -> int:
        return len(self.prompt_lengths)

    @property
    def ttft(self) -> float:
        """Seconds to the first token: the median over the runs."""
        return statistics.median(times[0] for times in self.token_seconds)

    @property
    def tpot(self) -> float:
        """Seconds per token after the first: the median over the runs. Needs two tokens."""
        if any(len(times) < 2 for times in self.token_seconds):
            raise ValueError(
                "time per output token needs at least two tokens in every run, got "
                f"{[len(times) for times in self.token_seconds]}; generate more"
            )
        return statistics.median(
            (times[-1] - times[0]) / (len(times) - 1) for times in self.token_seconds
        )

    @property
    def total(self) -> float:
        """Seconds from the call to the last token: the median over the runs."""
        return statistics.median(times[-1] for times in self.token_seconds)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Computed prompt tokens of all rows over TTFT: the median over the runs.

        4 prompts of 1,000 in 0.5 s are 8,000, not 8. What a prefix cache found is not counted.
        """
        return statistics.median(
            tokens / times[0]
            for tokens, times in zip(self.computed_tokens, self.token_seconds, strict=True)
        )

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens of all rows per second, the first of each row and the prefill left out."""
        return self.batch / self.tpot

    @property
    def gaps(self) -> tuple[tuple[float, ...], ...]:
        """Seconds between one token and the next, for each run."""
        return tuple(
            tuple(later - sooner for sooner, later in pairwise(times))
            for times in self.token_seconds
        )


def measure_generation(
    start: Callable[[], Iterable[Any]],
    prompt_lengths: Sequence[int],
    *,
    warmup: int = 1,
    repetitions: int = 3,
    device: torch.device | str | None = None,
    clock: Clock | None = None,
    prefix: PrefixCache | None = None,
) -> GenerationTiming:
    """Run ``start()`` to the end of its stream, ``warmup`` times unseen, then ``repetitions``.

    ``start`` returns a new stream that yields once per step, such as ``stream_cached(model,
    prompts, 16)``; what it does before the first token counts towards TTFT.

    ``prefix`` is the prefix cache that the stream begins its prompts in, as
    ``stream_with_prefix`` does: what it finds in a run is reported apart, as ``found_tokens``, and
    is left out of the prefill rate. Without it, every prompt token counts as computed.

    Raises ``ValueError`` for a count that is not positive, a stream that yields nothing, and for
    prompts in ``prefix`` of another length than was stated.

    >>> timing = measure_generation(lambda: iter("abc"), [5], clock=clock_for("cpu"))
    >>> len(timing.token_seconds), len(timing.token_seconds[0])
    (3, 3)
    """
    listed = isinstance(prompt_lengths, Sequence) and not isinstance(prompt_lengths, str | bytes)
    if not listed or not prompt_lengths:
        raise ValueError(
            "prompt_lengths must list the number of tokens of each prompt, got "
            f"{prompt_lengths!r:.80}"
        )
    lengths = tuple(check_count("a prompt length", length) for length in prompt_lengths)
    check_function("start", start)
    check_count("warmup", warmup, 0, MOST_REPETITIONS)
    check_count("repetitions", repetitions, 1, MOST_REPETITIONS)
    device = chosen_device(device)
    clock = clock_for(device) if clock is None else clock
    check_clock(clock)
    if prefix is not None:
        check_is("prefix", prefix, PrefixCache)
    runs, found = [], []
    for _ in range(warmup + repetitions):
        before = None if prefix is None else replace(prefix.stats)
        runs.append(_run(start, clock))
        if prefix is not None and before is not None:
            found.append(_found(prefix.stats, before, lengths))
    return GenerationTiming(lengths, tuple(runs[warmup:]), clock.name, tuple(found[warmup:]))


def _found(after: PrefixStats, before: PrefixStats, lengths: tuple[int, ...]) -> int:
    """How many prompt tokens one run found; the run must have begun the stated prompts."""
    began = after.prompts - before.prompts, after.prompt_tokens - before.prompt_tokens
    if began != (len(lengths), sum(lengths)):
        raise ValueError(
            f"a run began {began[0]} prompts of {began[1]} tokens in the prefix cache, but "
            f"prompt_lengths are {list(lengths)}; give the cache and the lengths of this stream"
        )
    return after.cached_tokens - before.cached_tokens


def _run(start: Callable[[], Iterable[Any]], clock: Clock) -> tuple[float, ...]:
    began = clock.mark()
    stream = start()
    if not isinstance(stream, Iterable):
        raise ValueError(f"start() must return a stream of tokens, got {stream!r:.80}")
    marks = [clock.mark() for _ in stream]
    if not marks:
        raise ValueError("the stream yielded no token; ask for at least one")
    return tuple(clock.seconds(began, mark) for mark in marks)
