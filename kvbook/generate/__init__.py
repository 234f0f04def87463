"""Generation: choosing tokens, and the loops that feed them back."""

from kvbook.generate.accept import Acceptance, accept_drafts, one_hot
from kvbook.generate.draft import Draft, Proposal
from kvbook.generate.draft_model import ModelDraft
from kvbook.generate.first_layers import first_layers
from kvbook.generate.loops import (
    generate_cached,
    generate_naive,
    left_pad,
    stream_cached,
    stream_naive,
)
from kvbook.generate.prefix import generate_with_prefix, stream_with_prefix
from kvbook.generate.prompt_lookup import PromptLookup
from kvbook.generate.rounds import speculate, speculate_with_prefix
from kvbook.generate.sampling import Sampler, greedy
from kvbook.generate.speculation import Speculation

__all__ = [
    "Acceptance",
    "Draft",
    "ModelDraft",
    "PromptLookup",
    "Proposal",
    "Sampler",
    "Speculation",
    "accept_drafts",
    "first_layers",
    "generate_cached",
    "generate_naive",
    "generate_with_prefix",
    "greedy",
    "left_pad",
    "one_hot",
    "speculate",
    "speculate_with_prefix",
    "stream_cached",
    "stream_naive",
    "stream_with_prefix",
]
