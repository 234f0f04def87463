"""One forward pass as positions: who the new tokens are and what they may see.

Knows: counts, lengths and positions. Does not know: slots, tensors of keys, layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbook.cache.view import NOT_A_TOKEN, visible, visible_count


@dataclass(frozen=True)
class Step:
    """What the queries of one forward pass may see of the keys that are read."""

    keys: Tensor  # (1 or B, S) int64, positions of everything that is read
    mask: Tensor | None  # see KVView
    is_causal: bool


def check_counts(counts: Sequence[int] | None, rows: int, T: int) -> list[int]:
    """Real tokens per row of a left-padded (rows, T) batch; ``None`` means all T.

    Raises ``ValueError`` when the list has another length or a count is outside 0…T.
    """
    if counts is None:
        return [T] * rows
    counts = list(counts)
    if len(counts) != rows or not all(isinstance(c, int) and 0 <= c <= T for c in counts):
        raise ValueError(
            f"counts must hold one integer from 0 to {T} for each of the {rows} rows, got {counts}"
        )
    return counts


def common_start(starts: Sequence[int], counts: Sequence[int], T: int) -> int | None:
    """The length that all rows share, if all of them add T tokens; ``None`` for a ragged step."""
    uniform = all(s == starts[0] for s in starts) and all(count == T for count in counts)
    return starts[0] if uniform else None


def new_positions(
    starts: Sequence[int], counts: Sequence[int], T: int, device: torch.device | str
) -> Tensor:
    """Positions of left-padded new tokens, (B, T); (1, T) where all rows are the same.

    >>> new_positions([0, 0], [3, 5], 5, "cpu").tolist()
    [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    >>> new_positions([7, 7], [2, 2], 2, "cpu").tolist()
    [[7, 8]]
    """
    start = common_start(starts, counts, T)
    if start is not None:
        return torch.arange(start, start + T, device=device)[None]
    first, count = (torch.tensor(x, device=device)[:, None] for x in (starts, counts))
    from_the_right = torch.arange(-T, 0, device=device)[None, :]  # -T … -1
    positions = first + count + from_the_right
    return positions.masked_fill(from_the_right < -count, NOT_A_TOKEN)


def look(
    queries: Tensor, keys: Tensor, start: int | None, window: int | None, sinks: int = 0
) -> Step:
    """What queries (1 or B, T) see of keys (1 or B, S).

    The keys must hold every visible position once. ``start`` is the common length before this
    step, ``None`` for a ragged one. From Python integers alone follows whether a mask is needed;
    no tensor is inspected.
    """
    T, S = queries.shape[1], keys.shape[1]
    if start is not None and T == 1:
        seen = visible_count(start + 1, window, sinks)
        if seen == S:  # as many keys as are visible: they all are
            return Step(keys, None, False)
    if start == 0 and S == T and (window is None or window >= T):
        return Step(keys, None, True)  # queries and keys are the same tokens
    return Step(keys, visible(queries, keys, window, sinks)[:, None], False)
