"""A model small enough to print and exact enough to prove things on.

Knows: one small shape and a seed. Does not know: language.
"""

from dataclasses import fields, replace
from typing import Any

import torch

from kvbook.config import ModelConfig
from kvbook.model.target import float_dtype
from kvbook.model.transformer import Transformer

# 6 query heads over 3 KV heads: each of the wrong head maps h % 3 and h // 3 differs from h // 2.
TOY = ModelConfig(
    vocab_size=64, d_model=32, n_layers=4, n_heads=6, n_kv_heads=3, head_dim=8, d_mlp=64,
    max_positions=256,
)


def toy_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """The book's toy: TOY with ``changes``, seeded random weights, float64.

    The caller's random state is left as it was. Norm weights are random too: with all ones, a
    forgotten norm weight could not be seen. ``ValueError`` for a seed that is no integer of 64
    bits, a dtype that no model computes in, and for what ``ModelConfig`` refuses.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be an integer from -2**63 to 2**64 - 1, got {seed!r:.80}")
    unknown = sorted(changes.keys() - {field.name for field in fields(TOY)})
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} cannot be changed; fields of ModelConfig: "
            f"{', '.join(field.name for field in fields(TOY))}"
        )
    float_dtype(dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(replace(TOY, **changes))
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    return model.to(dtype)
