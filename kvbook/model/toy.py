"""A model small enough to print and exact enough to prove things on.

Knows: one small shape, a seed, how much memory there is. Does not know: language.
"""

import os
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
    bits, a dtype that no model computes in, for what ``ModelConfig`` refuses, and for more weights
    than the machine has memory for.
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
    config = replace(TOY, **changes)
    check_memory(config, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(config)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    return model.to(dtype)


def check_memory(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` if the weights alone are larger than main memory, where that is known.

    Half of what fits by this rule may still be too much for a machine that is doing other things.
    """
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = config.parameters * dtype.itemsize
    if needed > memory:
        raise ValueError(
            f"these sizes make {config.parameters:,} weights, {needed:,} B in {dtype}, but this "
            f"machine has {memory:,} B of memory; make {largest_size(config)} smaller"
        )


def largest_size(config: ModelConfig) -> str:
    """The size that is furthest above the toy's own, in words."""
    sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_mlp")
    name = max(sizes, key=lambda name: getattr(config, name) / getattr(TOY, name))
    return f"{name} (now {getattr(config, name):,})"
