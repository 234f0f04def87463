"""Floating-point operations, counted while they run.

Knows: PyTorch's ``FlopCounterMode``, which module an operation ran in, names of kvbook's parts.
Does not know: closed formulas (those are in ``kvbook.accounting.flops``), time.

What is counted: matrix products and attention, a multiplication and an addition being two
operations; norms, rotations, softmax and activations are not. Attention over T queries and S keys
counts T·S pairs, masked or not, because that is what a counter of shapes can see. The pairs that
a causal mask leaves are fewer: ``kvbook.accounting.causal_pairs`` has them exactly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from kvbook.model.arguments import check_function

aten = torch.ops.aten


@dataclass(frozen=True)
class CountedFlops:
    """Operations by part of kvbook's Transformer; ``other`` ran in none of its modules.

    ``by_module`` holds the sum of each module with all inside it, by the module's path.
    """

    projections: int  # q, k, v and output
    attention: int  # scores and values
    mlp: int
    head: int
    other: int
    by_module: Mapping[str, int]

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.mlp + self.head + self.other


def count_flops(run: Callable[[], Any]) -> CountedFlops:
    """Call ``run()`` once and count its operations.

    The part comes from the innermost module of the name ``attention`` or ``mlp``; what else runs
    inside a ``Transformer`` is the head. Inside ``attention``, the attention operators and batched
    products are scores and values, plain products are projections.

    >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 5)).total
    60
    """
    check_function("run", run)
    counter = FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS)
    with counter:
        run()
    counts = counter.get_flop_counts()
    everything = sum(counts.get("Global", {}).values())
    attention = projections = mlp = inside = 0
    for path, by_operator in counts.items():
        if path.endswith(".attention"):
            pairs = sum(n for op, n in by_operator.items() if op not in PRODUCTS)
            attention += pairs
            projections += sum(by_operator.values()) - pairs
        if path.endswith(".mlp"):
            mlp += sum(by_operator.values())
        if path == "Transformer":
            inside = sum(by_operator.values())
    parts = attention + projections + mlp
    head = inside - parts if inside else 0
    by_module = {path: sum(ops.values()) for path, ops in counts.items() if path != "Global"}
    return CountedFlops(projections, attention, mlp, head, everything - parts - head, by_module)


PRODUCTS = (aten.mm, aten.addmm)  # of a matrix of weights; any other product is attention's


def cpu_attention_flops(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    values: tuple[int, ...],
    *_: Any,
    **__: Any,
) -> int:
    """Two products per query head: Q Kᵀ and weights times V, from the operands' shapes.

    (B, H, T, Dk), (B, Hkv, S, Dk), (B, Hkv, S, Dv).
    """
    B, H, T, key_width = queries
    S, value_width = values[-2:]
    return 2 * B * H * T * S * (key_width + value_width)


# PyTorch's counter knows the attention operators of accelerators; the CPU's it counts as 0.
ADDED_FORMULAS = {aten._scaled_dot_product_flash_attention_for_cpu: cpu_attention_flops}
