"""What ``speculate`` asks of whatever makes drafts.

Knows: the questions. Does not know: who answers them, the target.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvbook.cache import KVCache
from kvbook.generate.sampling import Sampler


class Proposal(NamedTuple):
    """Drafted tokens, k of them, and the distributions that they were drawn from, (k, V)."""

    tokens: list[int]
    probabilities: Tensor


@runtime_checkable
class Draft(Protocol):
    """Follows one text and guesses how it goes on.

    One round is one ``propose`` and then one ``extend`` with what was made of it. Whatever a draft
    proposes, the text is the target's: a bad one costs time.
    """

    @property
    def vocab_size(self) -> int:
        """V, that of the target."""

    @property
    def length(self) -> int:
        """Tokens of the text that it was told."""

    def check_room(self, tokens: int, k: int) -> None:
        """Raise ``ValueError`` unless it can follow ``tokens`` more, k drafts in each round."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these: the prompt, or accepted drafts and the token after them."""

    def truncate(self, length: int) -> None:
        """The text is again its first ``length`` tokens: what came after was never told."""

    def propose(self, k: int, sampler: Sampler) -> Proposal:
        """Up to k tokens, k being 1 or more, chosen as ``sampler`` would."""


def check_rollback(cache: KVCache, tokens: int) -> None:
    """Raise ``ValueError`` unless so many tokens can be taken back after any step."""
    if cache.rollback is not None and cache.rollback < tokens:
        raise ValueError(
            f"{tokens} tokens may have to be taken back, but the cache lets go of what the last "
            f"{cache.rollback} replaced; give fewer drafts (k), or make the cache with a larger "
            "rollback or tail"
        )


def generator_of(sampler: Sampler) -> torch.Generator | None:
    """The generator of the only row. Raises ``ValueError`` if there are several."""
    given = sampler.generator
    if given is None or isinstance(given, torch.Generator):
        return given
    if len(given) != 1:
        raise ValueError(f"one text takes one generator, got {len(given)}; give seeded([1])")
    return given[0]
