"""What a run of draft-and-verify did.

Knows: how many drafts were proposed and accepted in each round. Does not know: how.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speculation:
    """The new tokens, and how they came about.

    A round is one forward pass of the target over drafts. In round i, ``proposed[i]`` drafts were
    read and ``accepted[i]`` of them stood by the rule, those behind a stop token included. The
    pass that reads the prompt is no round: it gives the first token without drafts.

    >>> run = Speculation(tokens=[5, 6, 7, 8, 9], proposed=(3, 2), accepted=(2, 0))
    >>> run.tokens_per_round, run.wasted
    (2.0, 3)
    >>> run.acceptance_by_position
    (0.5, 0.5, 0.0)
    """

    tokens: list[int]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rounds(self) -> int:
        return len(self.proposed)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that one pass of the target gave on average: accepted drafts and one more.

        NaN where there was no round.
        """
        return (sum(self.accepted) + self.rounds) / self.rounds if self.rounds else float("nan")

    @property
    def wasted(self) -> int:
        """Drafts that the target read for nothing."""
        return sum(self.proposed) - sum(self.accepted)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Of the rounds that had a draft at place i, the share in which it stood, for i = 0, 1, …

        A draft stands only if those before it do.
        """
        rounds = list(zip(self.proposed, self.accepted, strict=True))
        shares = []
        for place in range(max(self.proposed, default=0)):
            stood = [accepted > place for proposed, accepted in rounds if proposed > place]
            shares.append(sum(stood) / len(stood))
        return tuple(shares)
