"""One forward pass as positions: who the new tokens are and what they may see.

Knows: counts, lengths and positions. Does not know: slots, tensors of keys, layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbook.cache.view import NOT_A_TOKEN, visible


@dataclass(frozen=True)
class Step:
    """What is fixed once per forward pass, before the first layer."""

    queries: Tensor  # (1 or B, T) int64, positions of the new tokens
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


def last_positions(
    ends: Sequence[int], counts: Sequence[int], T: int, device: torch.device | str
) -> Tensor:
    """Positions of left-padded new tokens, (B, T): row b ends at ``ends[b] - 1``.

    >>> last_positions([3, 5], [3, 5], 5, "cpu").tolist()
    [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    """
    end, count = (torch.tensor(x, device=device)[:, None] for x in (ends, counts))
    from_the_right = torch.arange(-T, 0, device=device)[None, :]  # -T … -1
    positions = end + from_the_right
    return positions.masked_fill(from_the_right < -count, NOT_A_TOKEN)


def uniform_step(start: int, T: int, line: Tensor, window: int | None) -> Step:
    """The step of a batch whose rows all hold ``start`` tokens and all add T.

    ``line`` is 0, 1, 2, … on the right device, at least ``start + T`` long. The kind of mask
    follows from Python integers: no tensor is inspected.
    """
    S = start + T
    queries, keys = line[None, start:S], line[None, :S]
    all_in_window = window is None or window >= S
    if T == 1 and all_in_window:
        return Step(queries, keys, None, False)
    if start == 0 and all_in_window:
        return Step(queries, keys, None, True)
    return Step(queries, keys, visible(queries, keys, window)[:, None], False)


def ragged_step(queries: Tensor, keys: Tensor, window: int | None) -> Step:
    """The step of a batch with padding or with rows of different lengths."""
    return Step(queries, keys, visible(queries, keys, window)[:, None], False)
