"""Deliberate changes to a model, to see what depends on what.

Knows: where a model takes its attention, its positions and its windows from. Does not know: which
change is right and which is wrong.
"""

import reprlib
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from numbers import Real

from torch import Tensor

from kvbook.model.arguments import check_function, check_is, check_number
from kvbook.model.attention import Attend
from kvbook.model.latent import Evaluate, LatentAttention
from kvbook.model.transformer import Attention, Transformer


def attend_with(model: Transformer, attend: Attend) -> Transformer:
    """Let every layer attend with ``attend(queries, view, scale)``; returns the model."""
    check_is("model", model, Transformer)
    check_function("attend", attend)
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.attend = attend
    return model


def evaluate_with(model: Transformer, evaluate: Evaluate) -> Transformer:
    """Let every latent layer compute as ``absorbed`` or ``materialized`` does; returns the model.

    Raises ``ValueError`` for a model without latent layers.
    """
    check_is("model", model, Transformer)
    check_function("evaluate", evaluate)
    layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
    if not layers:
        raise ValueError(
            "the model has no latent layers, so there is nothing to evaluate another way; build "
            "it from a config with a latent"
        )
    for layer in layers:
        layer.evaluate = evaluate
    return model


def with_window(
    model: Transformer, window: int | tuple[int | None, ...] | None, sinks: int = 0
) -> Transformer:
    """The same layers and weights under another window, for all layers or for each of them.

    ``model`` stays as it is; the two share their memory. Raises ``ValueError`` for a window or
    sinks that ``ModelConfig`` refuses.

    A model that was trained to see all of the past has not learned to do with less: what it loses
    under a window is no measure of what a model trained with one loses.
    """
    check_is("model", model, Transformer)
    other = copy(model)  # shallow: modules and weights are those of the model
    other.config = replace(model.config, window=window, sinks=sinks)
    return other


def move_positions(model: Transformer, move: Callable[[Tensor], Tensor]) -> Transformer:
    """Let the model rotate by ``move(positions)``, (b, T) int64, from now on; returns the model.

    Masks and slots keep the true positions.
    """
    check_is("model", model, Transformer)
    check_function("move", move)
    at = model.rope.at
    # Where they end after the move is not known, so the table is the whole one.
    model.rope.at = lambda positions, dtype, end=None: at(move(positions), dtype)  # type: ignore[method-assign]
    return model


def verdict(error: float | Tensor, rounding: float = 1e-10, clear: float = 1e-3) -> str:
    """``"ok"`` for an error below ``rounding``; ``"BROKEN"`` for one from ``clear`` on, or NaN.

    Raises ``ValueError`` for an error between the two: it would be neither rounding nor a clear
    break, and the experiment should be made sharper. Also for what is no error: several numbers,
    a number below 0, bounds in the wrong order.
    """
    for name, given in (("rounding", rounding), ("clear", clear)):
        check_number(name, given)
    if not 0 <= rounding <= clear:
        raise ValueError(
            f"bounds must be 0 <= rounding <= clear, got rounding {rounding!r} and clear {clear!r}"
        )
    error = _one_number(error)
    if error < rounding:
        return "ok"
    if error < clear:
        raise ValueError(
            f"an error of {error:.1e} is neither rounding (below {rounding:.0e}) nor a clear break "
            f"(from {clear:.0e}); use float64 or a stronger change"
        )
    return "BROKEN"


def _one_number(error: float | Tensor) -> float:
    if isinstance(error, Tensor):
        single = error.numel() == 1 and error.is_floating_point()
    else:
        single = isinstance(error, Real) and not isinstance(error, bool)
    if not single or error < 0:
        raise ValueError(
            f"an error is one number from 0 on, got {reprlib.repr(error)}; take .abs().max() of a "
            "difference"
        )
    return float(error)
