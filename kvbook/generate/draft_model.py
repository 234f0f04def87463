"""Drafts of a smaller model.

Knows: a model, its cache, what it proposed last. Does not know: the target.
"""

from collections.abc import Sequence

import torch

from kvbook.cache import KVCache
from kvbook.cache.sizes import check_class
from kvbook.errors import CacheFullError
from kvbook.generate.accept import draw
from kvbook.generate.draft import Proposal, check_rollback, generator_of
from kvbook.generate.sampling import Sampler
from kvbook.model.transformer import Transformer


class ModelDraft:
    """Drafts that ``model`` chooses one after the other, as it would write the text itself.

    ``cache`` is its own, ``model.new_cache(1, capacity)`` say, of any kind and empty. It holds the
    beginning of the text and never anything else: after k drafts it has read k - 1 of them, those
    that did not stand are taken back, and if all did, the last one is read before the next round.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        check_class("model", model, Transformer, "load_smollm2() or first_layers(target, 10)")
        check_class("cache", cache, KVCache, "model.new_cache(1, capacity) makes one")
        if cache.lengths != (0,) or cache.layer_kinds != model.layer_kinds:
            raise ValueError(
                "a draft needs an empty cache for one row of its own model, got one of "
                f"{len(cache.layer_kinds)} layers whose rows hold {list(cache.lengths)}; make it "
                "with model.new_cache(1, capacity)"
            )
        self.model, self.cache = model, cache
        self.text: list[int] = []
        self._proposed: list[int] = []

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def length(self) -> int:
        return len(self.text)

    def check_room(self, tokens: int, k: int) -> None:
        """Raise ``CacheFullError`` if cache or model are too short, ``ValueError`` if the cache
        cannot take back k - 1 tokens."""
        end, longest = self.length + tokens, self.model.config.max_positions
        if end > longest:
            raise CacheFullError(
                f"the draft's model has {longest} positions, but the text would reach {end} tokens "
                "before its last drafts; ask for fewer, or take another draft"
            )
        self.cache.check_room([end - self.cache.lengths[0]])
        check_rollback(self.cache, k - 1)

    def extend(self, tokens: Sequence[int]) -> None:
        same = [a == b for a, b in zip(self._proposed, tokens, strict=False)]
        agreed = [*same, False].index(False)
        self._forget_beyond(self.length + agreed)
        self.text += tokens
        self._proposed = []

    def propose(self, k: int, sampler: Sampler) -> Proposal:
        if not self.text:
            raise ValueError("a draft continues a text; extend() it with the prompt first")
        generator = generator_of(sampler)
        self._forget_beyond(self.length - 1)  # the last token is read now, so that it is answered
        unread, tokens, rows = self.text[self.cache.lengths[0] :], [], []
        for _ in range(k):
            new = torch.tensor([unread], device=self.model.device)
            logits = self.model(new, self.cache, last_only=True)
            row = sampler.probabilities(logits[:, -1])  # (1, V)
            unread = [draw(row[0], generator)]
            tokens += unread
            rows.append(row)
        self._proposed = tokens
        return Proposal(tokens, torch.cat(rows))

    def truncate(self, length: int) -> None:
        """Forget what came after ``length`` tokens. Where the cache has let go of what the text
        before needs, it is emptied, and the text is read anew."""
        self.text, self._proposed = self.text[:length], []
        try:
            self._forget_beyond(length)
        except ValueError:
            self.cache.reset()

    def reset(self) -> None:
        """Forget the text: another one may begin."""
        self.cache.reset()
        self.text, self._proposed = [], []

    def _forget_beyond(self, length: int) -> None:
        self.cache.truncate(min(length, self.cache.lengths[0]))
