"""What the queries of one forward pass may see of the keys that are read.

Knows: positions, windows. Does not know: slots, tensors of keys, layers.
"""

from dataclasses import dataclass

from torch import Tensor

from kvbook.cache.layer_kind import LayerKind
from kvbook.cache.step import Step
from kvbook.cache.view import visible, visible_count


@dataclass(frozen=True)
class AttentionMask:
    """The mask of one kind of layer in one step, in the form that ``KVView`` describes."""

    positions: Tensor  # (1 or B, S) int64, of everything that is read
    mask: Tensor | None  # bool (1 or B, 1, T, S), True where visible
    is_causal: bool


def attention_mask(
    step: Step, positions: Tensor, kind: LayerKind, in_order: bool
) -> AttentionMask:
    """What the new tokens of ``step`` see of keys at ``positions`` (1 or B, S).

    The keys must hold every visible position once. ``in_order`` says that they ascend, so that a
    text's first pass can be called causal. From Python values alone follows whether a mask is
    needed; no tensor is inspected.
    """
    start, T, S = step.common_start, step.T, positions.shape[1]
    if start is not None and T == 1 and visible_count(start + 1, kind.window, kind.sinks) == S:
        return AttentionMask(positions, None, False)  # as many keys as are visible: they all are
    if in_order and start == 0 and S == T and (kind.window is None or kind.window >= T):
        return AttentionMask(positions, None, True)  # queries and keys are the same tokens
    return AttentionMask(positions, full_mask(step, positions, kind), False)


def full_mask(step: Step, positions: Tensor, kind: LayerKind) -> Tensor:
    """The mask written out: bool (1 or B, 1, T, S)."""
    return visible(step.positions, positions, kind.window, kind.sinks)[:, None]
