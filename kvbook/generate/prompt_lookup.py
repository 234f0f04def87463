"""Drafts copied from the text itself.

Knows: tokens. Does not know: models, probabilities other than certainty.
"""

from collections.abc import Sequence

from kvbook.cache.sizes import check_sizes
from kvbook.generate.accept import one_hot
from kvbook.generate.draft import Proposal
from kvbook.generate.sampling import Sampler


class PromptLookup:
    """Proposes what followed the last tokens when they last occurred before (n-gram lookup).

    The longest match of ``max_ngram`` down to ``min_ngram`` tokens counts, and of equally long
    ones the latest. A copy that comes to the end of the text goes on with what it has copied, so
    that a loop stays a loop. Without a match nothing is proposed. It has no weights, no cache and
    no probabilities: each draft is taken as certain. (Saxena 2023, prompt-lookup-decoding.)

    >>> lookup = PromptLookup(vocab_size=10)
    >>> lookup.extend([1, 2, 3, 4, 2, 3])
    >>> lookup.propose(5, Sampler()).tokens
    [4, 2, 3, 4, 2]
    """

    def __init__(self, vocab_size: int, max_ngram: int = 3, min_ngram: int = 1) -> None:
        check_sizes(vocab_size=vocab_size, max_ngram=max_ngram, min_ngram=min_ngram)
        if min_ngram > max_ngram:
            raise ValueError(
                f"min_ngram must be at most max_ngram, got {min_ngram} and {max_ngram}"
            )
        self.vocab_size, self.max_ngram, self.min_ngram = vocab_size, max_ngram, min_ngram
        self.text: list[int] = []

    @property
    def length(self) -> int:
        return len(self.text)

    def check_room(self, tokens: int, k: int) -> None:
        """There is always room."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def propose(self, k: int, sampler: Sampler) -> Proposal:
        line, copied = list(self.text), self._end_of_last_match()
        if copied is not None:
            for place in range(copied, copied + k):
                line.append(line[place])
        tokens = line[len(self.text) :]
        return Proposal(tokens, one_hot(tokens, self.vocab_size))

    def truncate(self, length: int) -> None:
        self.text = self.text[:length]

    def reset(self) -> None:
        """Forget the text: another one may begin."""
        self.text = []

    def _end_of_last_match(self) -> int | None:
        """Where the text goes on behind the match."""
        text = self.text
        for n in range(self.max_ngram, self.min_ngram - 1, -1):
            last = text[-n:]
            for end in range(len(text) - 1, n - 1, -1):
                if text[end - n : end] == last:
                    return end
        return None
