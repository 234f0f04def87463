"""Noticing a NaN where attention would hide it.

Knows: which operators are attention, and what they are given. Does not know: models, caches.

A NaN spreads through every operation of a forward pass but one: PyTorch's fused attention on the
CPU takes a query whose scores are NaN to zeros, which look like an answer
(https://github.com/pytorch/pytorch/issues/141128). So it is looked for in what attention is given.
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ATTENTION = ("scaled_dot_product_attention", "_scaled_dot_product_")


class RefuseNaN(TorchDispatchMode):
    """While it is entered, attention over a NaN raises ``ValueError`` instead of giving zeros.

    >>> import torch
    >>> x = torch.full((1, 1, 2, 8), float("nan"))
    >>> with RefuseNaN():  # doctest: +ELLIPSIS
    ...     torch.nn.functional.scaled_dot_product_attention(x, x, x)
    Traceback (most recent call last):
    ValueError: attention was given NaN in its queries of shape (1, 1, 2, 8); ...
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__.startswith(ATTENTION):
            refuse_nan_operands((args, kwargs))
        return func(*args, **kwargs)


def refuse_nan_operands(operands: Any) -> None:
    """Raise ``ValueError`` if a floating tensor among ``operands`` holds a NaN."""
    names = ("queries", "keys", "values", "mask")
    tensors = [leaf for leaf in tree_leaves(operands) if isinstance(leaf, Tensor)]
    for name, tensor in zip(names, tensors, strict=False):
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError(
                f"attention was given NaN in its {name} of shape {tuple(tensor.shape)}; look for "
                "it in the weights and in what the cache holds already"
            )


def refuse_nan(name: str, numbers: Tensor) -> Tensor:
    """``numbers`` as they are; ``ValueError`` if one of them is NaN."""
    bad = numbers.isnan()
    if bool(bad.any()):
        raise ValueError(
            f"{int(bad.sum()):,} of {numbers.numel():,} {name} are NaN; look for NaN or infinity "
            "in the model's weights"
        )
    return numbers
