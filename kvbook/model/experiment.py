"""Deliberate changes to a model, to see what depends on what.

Knows: where a model takes its attention and its positions from. Does not know: which change is
right and which is wrong.
"""

from collections.abc import Callable

from torch import Tensor

from kvbook.model.attention import Attend
from kvbook.model.transformer import Attention, Transformer


def attend_with(model: Transformer, attend: Attend) -> Transformer:
    """Let every layer attend with ``attend(queries, view, scale)``; returns the model."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = attend
    return model


def move_positions(model: Transformer, move: Callable[[Tensor], Tensor]) -> Transformer:
    """Let the model rotate by ``move(positions)``, (b, T) int64, from now on; returns the model.

    Masks and slots keep the true positions.
    """
    at = model.rope.at
    model.rope.at = lambda positions, dtype: at(move(positions), dtype)  # type: ignore[method-assign]
    return model


def verdict(error: float | Tensor, rounding: float = 1e-10, clear: float = 1e-3) -> str:
    """``"ok"`` for an error below ``rounding``; ``"BROKEN"`` for one from ``clear`` on, or NaN.

    Raises ``ValueError`` for an error between the two: it would be neither rounding nor a clear
    break, and the experiment should be made sharper.
    """
    error = float(error)
    if error < rounding:
        return "ok"
    if error < clear:
        raise ValueError(
            f"an error of {error:.1e} is neither rounding (below {rounding:.0e}) nor a clear break "
            f"(from {clear:.0e}); use float64 or a stronger change"
        )
    return "BROKEN"
