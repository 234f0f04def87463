"""What a model asks of whatever remembers its past.

Knows: the questions. Does not know: who answers them.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvbook.cache.layer_kind import LayerKind
from kvbook.cache.view import View


@runtime_checkable
class Memory(Protocol):
    """A cache, or something that a model can use like one.

    One forward pass is one ``reserve`` and then one ``update`` for each layer, in their order.
    """

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row of the batch holds."""

    @property
    def layer_kinds(self) -> Sequence[LayerKind]:
        """What each layer stores and sees."""

    def reserve(self, counts: Sequence[int], T: int) -> Tensor:
        """Make room: row b adds its last ``counts[b]`` of T tokens.

        Returns the positions of the new tokens, (1 or B, T) int64.
        """

    def update(self, layer: int, keys: Tensor, values: Tensor) -> View:
        """Add one layer's new keys and values, (B, Hkv, T, D), and return what it reads."""
