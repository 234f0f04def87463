"""Generation: choosing tokens, and the loops that feed them back."""

from kvbook.generate.loops import (
    generate_cached,
    generate_naive,
    left_pad,
    stream_cached,
    stream_naive,
)
from kvbook.generate.prefix import generate_with_prefix, stream_with_prefix
from kvbook.generate.sampling import Sampler, greedy

__all__ = [
    "Sampler",
    "generate_cached",
    "generate_naive",
    "generate_with_prefix",
    "greedy",
    "left_pad",
    "stream_cached",
    "stream_naive",
    "stream_with_prefix",
]
