"""Tiny models, the formulas that they must follow, and the two probes.

``reference_logits`` is the model written out from its formulas, one head at a time, with explicit
positions and an explicit rule of who sees whom. It shares no code with kvbook: it reads the
weights and nothing else. It sees one sequence at a time and has no cache.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvbook.cache import Contiguous, DenseStore, KVCache, Recompute
from kvbook.config import ModelConfig
from kvbook.model.attention import attend
from kvbook.model.transformer import Transformer

# Two layers, so that what one layer gets wrong reaches the keys of the next. The norm's epsilon
# is large enough to be seen, and no rotary frequency is close to zero.
SMALL = ModelConfig(
    vocab_size=29, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, d_mlp=20,
    max_positions=64, norm_eps=1e-2, rope_theta=50.0, tied_embeddings=False,
)  # fmt: skip


@lru_cache(maxsize=64)
def toy(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Transformer:
    """SMALL with ``changes`` and weights that hide nothing: sharp attention, norms away from 1."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(replace(SMALL, **changes), torch.float64)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            weight.copy_(1 + 0.3 * noise)
        elif weight.ndim == 1 or name == "embedding.weight":
            weight.copy_(noise)
        else:
            weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)
    return model.to(dtype)


def reference_logits(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """Logits (n, V) of one text, float64, from the formulas. Rotary scaling is not covered."""
    c = model.config
    w = {name: weight.double() for name, weight in model.named_parameters()}
    n, D, H, Hkv = len(tokens), c.head_dim, c.n_heads, c.n_kv_heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / ((x**2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def turned(x: Tensor) -> Tensor:
        """Pair i is the complex number x[i] + j·x[i + D/2]; position p turns it by p·theta_i."""
        pair = torch.complex(x[:, : D // 2], x[:, D // 2 :])
        theta = torch.tensor([c.rope_theta ** (-2 * i / D) for i in range(D // 2)], dtype=x.dtype)
        angle = torch.arange(n).double()[:, None] * theta
        pair = pair * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag], 1)

    hidden_from = [
        [key > query or (c.window is not None and query - key >= c.window) for key in range(n)]
        for query in range(n)
    ]
    x = w["embedding.weight"][list(tokens)]
    for layer in range(c.n_layers):
        part = f"blocks.{layer}."
        projected = norm(x, w[part + "attention_norm.weight"]) @ w[part + "attention.qkv.weight"].T
        if c.qkv_bias:
            projected = projected + w[part + "attention.qkv.bias"]
        heads = projected.split(D, 1)
        q, k, v = heads[:H], heads[H : H + Hkv], heads[H + Hkv :]
        if c.qk_norm:
            q = [norm(one, w[part + "attention.q_norm.weight"]) for one in q]
            k = [norm(one, w[part + "attention.k_norm.weight"]) for one in k]
        outputs = []
        for head in range(H):
            kv = head * Hkv // H
            scores = turned(q[head]) @ turned(k[kv]).T / D**0.5
            scores[torch.tensor(hidden_from)] = float("-inf")
            outputs.append(scores.softmax(-1) @ v[kv])
        x = x + torch.cat(outputs, 1) @ w[part + "attention.output.weight"].T
        inner = norm(x, w[part + "mlp_norm.weight"]) @ w[part + "mlp.gate_up.weight"].T
        gate, up = inner[:, : c.d_mlp], inner[:, c.d_mlp :]
        x = x + (gate * torch.sigmoid(gate) * up) @ w[part + "mlp.down.weight"].T
    head = w["embedding.weight" if c.tied_embeddings else "head.weight"]
    return norm(x, w["norm.weight"]) @ head.T


def text(n: int, seed: int = 0, vocab: int = SMALL.vocab_size) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (n,), generator=generator).tolist()


def batch(rows: int, T: int, seed: int = 0) -> Tensor:
    return torch.tensor([text(T, seed=100 * seed + row) for row in range(rows)])


# ---- The cache as it was, to show that an error changed nothing.


def snapshot(cache: KVCache) -> tuple[tuple[int, ...], Tensor, Tensor]:
    return cache.lengths, cache.store.keys.clone(), cache.store.values.clone()


def unchanged(cache: KVCache, before: tuple[tuple[int, ...], Tensor, Tensor]) -> bool:
    lengths, keys, values = snapshot(cache)
    return (
        lengths == before[0]
        and keys.equal(before[1])
        and values.equal(before[2])
    )


# ---- The visibility probe.


def probe_cache(rows: int, capacity: int, window: int | None = None) -> KVCache:
    """One layer, two KV heads, as wide as it is long: a value can name any position."""
    store = DenseStore(1, rows, 2, capacity, capacity, capacity, torch.float64)
    return KVCache(Contiguous(rows, capacity), store, window)


def weights_by_position(
    memory: KVCache | Recompute, counts: Sequence[int], T: int, width: int
) -> Tensor:
    """Attention weights (B, T, width) of T new tokens over positions 0 … width - 1.

    Queries are zero, so all visible keys weigh the same; the value of the token at position p is
    the p-th unit vector, so the output is the list of weights. Padding carries the value 1e10.
    """
    starts = memory.lengths
    memory.reserve(counts, T)
    rows = len(counts)
    values = torch.full((rows, 2, T, width), 1e10, dtype=torch.float64)
    for row in range(rows):
        for i in range(counts[row]):
            column = T - counts[row] + i
            values[row, :, column] = torch.eye(width, dtype=torch.float64)[starts[row] + i]
    keys = torch.randn(rows, 2, T, width, dtype=torch.float64)
    view = memory.update(0, keys, values)
    out = attend(torch.zeros(rows, 4, T, width, dtype=torch.float64), view, 1.0)
    assert all(out[:, head].equal(out[:, 0]) for head in range(4))
    return out[:, 0]


def fractions(weights: Tensor) -> list[Fraction]:
    """One row of weights as exact fractions; fails if one is not a fraction to 1e-15."""
    exact = [Fraction(x).limit_denominator(1000) for x in weights.tolist()]
    assert all(abs(float(f) - x) < 1e-15 for f, x in zip(exact, weights.tolist(), strict=True))
    return exact


def seen(weights: Tensor) -> list[set[int]]:
    """For each query, (T, width), the positions that it sees; all must weigh the same."""
    result = []
    for row in weights:
        found = {p for p, f in enumerate(fractions(row)) if f}
        assert fractions(row) == [Fraction(p in found, len(found) or 1) for p in range(len(row))]
        result.append(found)
    return result
