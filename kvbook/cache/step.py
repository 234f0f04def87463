"""One forward pass as positions: which tokens are new, in which row.

Knows: lengths, counts and positions. Does not know: slots, masks, tensors of keys, layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvbook.cache.sizes import check_counts_from_zero
from kvbook.cache.view import NOT_A_TOKEN


@dataclass(frozen=True)
class Step:
    """Row b holds ``starts[b]`` tokens and adds the last ``counts[b]`` of T; the rest is padding.

    Made once per forward pass, and handed to everybody who has to prepare for it.

    >>> step = Step((0, 7), (3, 1), 3)
    >>> step.ends, step.common_start, step.positions.tolist()
    ((3, 8), None, [[0, 1, 2], [-1, -1, 7]])
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    T: int
    device: torch.device | str = "cpu"

    @property
    def rows(self) -> int:
        """Rows of the batch: B."""
        return len(self.starts)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens of each row afterwards."""
        return tuple(map(sum, zip(self.starts, self.counts, strict=True)))

    @cached_property
    def common_start(self) -> int | None:
        """The length that all rows share, if all of them add T tokens; ``None`` where ragged."""
        alike = len(set(self.starts)) == 1 and set(self.counts) == {self.T}
        return self.starts[0] if alike else None

    @cached_property
    def positions(self) -> Tensor:
        """Of the new tokens, int64: (1, T) where all rows are alike, (B, T) elsewhere."""
        if self.common_start is not None:
            start = self.common_start
            return torch.arange(start, start + self.T, device=self.device)[None]
        ends, counts = (
            torch.tensor(numbers, device=self.device)[:, None]
            for numbers in (self.ends, self.counts)
        )
        from_the_right = torch.arange(-self.T, 0, device=self.device)[None, :]  # -T … -1
        return (ends + from_the_right).masked_fill(from_the_right < -counts, NOT_A_TOKEN)

    @property
    def columns(self) -> list[range]:
        """Where the new tokens of each row stand among the T."""
        return [range(self.T - count, self.T) for count in self.counts]

    @property
    def new_positions(self) -> list[range]:
        """Positions of the new tokens of each row, as Python integers."""
        return [range(start, end) for start, end in zip(self.starts, self.ends, strict=True)]


def check_counts(counts: Sequence[int] | None, rows: int, T: int) -> tuple[int, ...]:
    """Real tokens per row of a left-padded (rows, T) batch; ``None`` means all T.

    Raises ``ValueError`` when the list has another length or a count is outside 0…T.
    """
    if counts is None:
        return (T,) * rows
    check_counts_from_zero(T=T)
    fits = isinstance(counts, list | tuple) and len(counts) == rows
    if not fits or not all(type(count) is int and 0 <= count <= T for count in counts):
        raise ValueError(
            f"counts must hold one integer from 0 to {T} for each of the {rows} rows, got "
            f"{counts!r:.200}"
        )
    return tuple(counts)
