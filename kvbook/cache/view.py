"""What attention is given, and the one rule of who sees whom.

Knows: positions. Does not know: where keys are kept, how they are stored, what a layer computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvbook.cache.sizes import check_counts_from_zero, check_sizes

NOT_A_TOKEN = -1  # the position of padding: such a key is seen by no query


class View(Protocol):
    """What attention asks of a view; ``KVView`` says what each part means."""

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys (B, Hkv, S, Dk) and values (B, Hkv, S, Dv): ask once per call."""

    @property
    def positions(self) -> Tensor: ...

    @property
    def mask(self) -> Tensor | None: ...

    @property
    def is_causal(self) -> bool: ...

    def tiles(self, size: int) -> "Iterator[KVView]":
        """The view in pieces of ``size`` keys, each with its own part of the mask."""


@dataclass(frozen=True)
class KVView:
    """The keys and values that one layer reads in one call, as tensors.

    ``mask`` and ``is_causal`` are what ``visible`` says for this call, in the form that
    PyTorch's ``scaled_dot_product_attention`` takes: both empty when every key is visible to
    every query, ``is_causal`` when queries and keys are the same tokens, a mask otherwise.
    """

    keys: Tensor  # (B, Hkv, S, Dk), already rotated
    values: Tensor  # (B, Hkv, S, Dv)
    positions: Tensor  # (1 or B, S) int64, NOT_A_TOKEN where a slot holds none
    mask: Tensor | None = None  # bool (1 or B, 1, T, S), True where visible
    is_causal: bool = False

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values."""
        return self.keys, self.values

    def tiles(self, size: int) -> "Iterator[KVView]":
        """The view in pieces of ``size`` keys, each with its own part of the mask."""
        check_sizes(size=size)
        mask = explicit_mask(self.positions, self.mask, self.is_causal)
        for start in range(0, self.keys.shape[2], size):
            part = slice(start, start + size)
            yield KVView(
                self.keys[:, :, part],
                self.values[:, :, part],
                self.positions[:, part],
                None if mask is None else mask[..., part],
            )


def visible(queries: Tensor, keys: Tensor, window: int | None = None, sinks: int = 0) -> Tensor:
    """Which keys each query may see, from positions alone: bool (B, T, S).

    ``queries`` (B, T) and ``keys`` (B, S) are int64 positions. A key is visible if it is a
    token, if it is not in the query's future, and if it is among the last ``window`` positions
    up to and including the query's own or among the first ``sinks`` of the text.

    >>> import torch
    >>> visible(torch.tensor([[3, 4]]), torch.arange(5)[None]).int().tolist()
    [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]
    >>> visible(torch.tensor([[4]]), torch.arange(5)[None], window=2, sinks=1).int().tolist()
    [[[1, 0, 0, 1, 1]]]
    """
    for name, positions in (("queries", queries), ("keys", keys)):
        if not isinstance(positions, Tensor) or positions.ndim != 2:
            raise ValueError(f"{name} must be positions (B, T), got {positions!r:.80}")
    if queries.device != keys.device:
        raise ValueError(f"queries are on {queries.device}, keys on {keys.device}; move one")
    _check_window(window, sinks)
    query, key = queries[:, :, None], keys[:, None, :]
    seen = (key >= 0) & (key <= query)
    if window is not None:
        seen &= (key > query - window) | (key < sinks)
    return seen


def _check_window(window: int | None, sinks: int) -> None:
    if window is not None:
        check_sizes(window=window)
    check_counts_from_zero(sinks=sinks)


def explicit_mask(positions: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """A view's mask, written out where the view only says that it is causal."""
    return visible(positions, positions)[:, None] if is_causal else mask


def visible_count(end: int, window: int | None, sinks: int = 0) -> int:
    """How many of the positions 0 … end-1 the last of them sees.

    >>> [visible_count(end, window=4, sinks=1) for end in (1, 4, 5, 6, 100)]
    [1, 4, 5, 5, 5]
    """
    check_counts_from_zero(end=end)
    _check_window(window, sinks)
    if window is None:
        return end
    return min(end, window) + min(sinks, max(0, end - window))
