"""Where the target reads tokens that may be taken back.

Knows: one text, what of it is read, what is not settled yet. Does not know: drafts' makers,
chance, when a text ends.

One round is one ``read`` and then one ``keep``.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvbook.cache import KVCache, PrefixCache
from kvbook.cache.prefix import CachedSequence
from kvbook.model.transformer import Transformer


class Verification(Protocol):
    """A text in some cache, to which the target adds tokens."""

    def read(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """Read ``tokens``, then k ``drafts``; logits (k + 1, V) after the former and each draft."""

    def keep(self, drafts: int) -> None:
        """The first so many of the drafts stay, the others were never there."""


class InCache:
    """A text in the only row of a cache: what falls is truncated."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.settled = cache.lengths[0]

    def read(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
        self._check_untouched()
        new = torch.tensor([[*tokens, *drafts]], device=self.model.device)
        logits = self.model(new, self.cache, last_only=not drafts)
        self.settled += len(tokens)
        return logits[0, -1 - len(drafts) :]

    def keep(self, drafts: int) -> None:
        self.settled += drafts
        self.cache.truncate(self.settled)

    def _check_untouched(self) -> None:
        if self.cache.lengths != (self.settled,):
            raise ValueError(
                f"the cache holds {list(self.cache.lengths)} tokens, but {self.settled} were read: "
                "somebody else wrote to it between two steps; give the draft a cache of its own"
            )


class InPrefixCache:
    """A sequence of a prefix cache: drafts are appended, and what falls is retracted.

    Only what stays is committed, so no block with a rejected draft can be found. ``begin`` starts
    the sequence with the first tokens that are read, and ``end`` gives its blocks back.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        prefix: PrefixCache,
        begin: Callable[[Sequence[int]], CachedSequence],
    ) -> None:
        self.model, self.cache, self.prefix, self.begin = model, cache, prefix, begin
        self.sequence: CachedSequence | None = None
        self.settled = 0

    def read(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
        sequence = self.sequence
        if sequence is None:
            sequence = self.sequence = self.begin(tokens)
        else:
            self.prefix.append(sequence, tokens)
        self.settled = len(sequence.tokens)
        self.prefix.append(sequence, drafts)
        self.cache.bind([sequence], lengths=[sequence.written])
        new = [sequence.tokens[sequence.written :].tolist()]
        new_tokens = torch.tensor(new, device=self.model.device)
        return self.model(new_tokens, self.cache, last_only=not drafts)[0, -1 - len(drafts) :]

    def keep(self, drafts: int) -> None:
        assert self.sequence is not None
        self.settled += drafts
        self.prefix.commit(self.sequence, self.settled)
        self.prefix.retract(self.sequence, self.settled)

    def end(self) -> None:
        """Give the blocks back; those that are full can be found by other texts."""
        self.cache.reset()
        if self.sequence is not None:
            self.prefix.end(self.sequence)
