"""Tiny models, the formulas that they must follow, and the two probes.

``reference_logits`` is the model written out from its formulas, one head at a time, with explicit
positions and an explicit rule of who sees whom. It shares no code with kvbook: it reads the
weights and nothing else. It sees one sequence at a time and has no cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvbook.cache import CacheGroup, Contiguous, DenseStore, KVCache, LayerKind, Recompute
from kvbook.config import LatentConfig, ModelConfig
from kvbook.model.attention import attend
from kvbook.model.transformer import Transformer

# Two layers, so that what one layer gets wrong reaches the keys of the next. The norm's epsilon
# is large enough to be seen, and no rotary frequency is close to zero.
SMALL = ModelConfig(
    vocab_size=29, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, d_mlp=20,
    max_positions=64, norm_eps=1e-2, rope_theta=50.0, tied_embeddings=False,
)  # fmt: skip
# The changes that give SMALL one latent for all heads: toy(**LATENT). No two widths are alike: a
# stored key has 5 + 4 elements, a head compares 2 + 4 and returns 3.
LATENT: dict[str, Any] = {
    "n_kv_heads": 4,
    "latent": LatentConfig(
        q_rank=7, kv_rank=5, nope_dim=2, rope_dim=4, value_dim=3, norm_eps=3e-2
    ),
}


@lru_cache(maxsize=256)
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


def as_it_is(x: Tensor) -> Tensor:
    return x


def reference_logits(
    model: Transformer, tokens: Sequence[int], stored: Callable[[Tensor], Tensor] = as_it_is
) -> Tensor:
    """Logits (n, V) of one text, float64, from the formulas. Rotary scaling is not covered.

    ``stored`` says what is left of the vectors (n, 1, D) of one head after they were cached:
    rotated keys, values, or latents with their rotated key.
    """
    c = model.config
    w = {name: weight.double() for name, weight in model.named_parameters()}
    n, D, H, Hkv = len(tokens), c.head_dim, c.n_heads, c.n_kv_heads

    def norm(x: Tensor, weight: Tensor, eps: float = c.norm_eps) -> Tensor:
        return x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * weight

    def turned(x: Tensor) -> Tensor:
        """Pair i is the complex number x[i] + j·x[i + d/2]; position p turns it by p·theta_i."""
        d = x.shape[1]
        pair = torch.complex(x[:, : d // 2], x[:, d // 2 :])
        theta = torch.tensor([c.rope_theta ** (-2 * i / d) for i in range(d // 2)], dtype=x.dtype)
        angle = torch.arange(n).double()[:, None] * theta
        pair = pair * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag], 1)

    def hidden(window: int | None) -> Tensor:
        """True where query (row) may not see key (column)."""
        return torch.tensor([
            [
                key > query
                or (window is not None and query - key >= window and key >= c.sinks)
                for key in range(n)
            ]
            for query in range(n)
        ])

    def left(x: Tensor) -> Tensor:
        return stored(x[:, None])[:, 0]

    def weighed(scores: Tensor, values: Tensor, window: int | None) -> Tensor:
        return scores.masked_fill(hidden(window), float("-inf")).softmax(-1) @ values

    def grouped(x: Tensor, part: str, window: int | None) -> list[Tensor]:
        """The output of each head, (n, D), from heads that share keys and values."""
        projected = x @ w[part + "qkv.weight"].T
        if c.qkv_bias:
            projected = projected + w[part + "qkv.bias"]
        heads = projected.split(D, 1)
        q, k, v = heads[:H], heads[H : H + Hkv], heads[H + Hkv :]
        if c.qk_norm:
            q = [norm(one, w[part + "q_norm.weight"]) for one in q]
            k = [norm(one, w[part + "k_norm.weight"]) for one in k]
        k, v = [left(turned(one)) for one in k], [left(one) for one in v]
        outputs = []
        for head in range(H):
            kv = head * Hkv // H
            outputs.append(weighed(turned(q[head]) @ k[kv].T / D**0.5, v[kv], window))
        return outputs

    def from_latents(x: Tensor, part: str, window: int | None) -> list[Tensor]:
        """The output of each head, (n, value), each with keys and values made from the latent."""
        sizes = c.latent
        assert sizes is not None
        nope, rope, rank = sizes.nope_dim, sizes.rope_dim, sizes.kv_rank
        down = x @ w[part + "latent_down.weight"].T
        latent = norm(down[:, :rank], w[part + "latent_norm.weight"], sizes.norm_eps)
        entry = left(torch.cat([latent, turned(down[:, rank:])], 1))
        latent, shared = entry[:, :rank], entry[:, rank:]
        if sizes.q_rank is not None:
            x = x @ w[part + "query_down.weight"].T
            x = norm(x, w[part + "query_norm.weight"], sizes.norm_eps)
        outputs = []
        for head in range(H):
            q = x @ w[part + "query.weight"][head * (nope + rope) :][: nope + rope].T
            up = w[part + "latent_up.weight"][head * (nope + sizes.value_dim) :]
            k, v = latent @ up[:nope].T, latent @ up[nope : nope + sizes.value_dim].T
            scores = q[:, :nope] @ k.T + turned(q[:, nope:]) @ shared.T
            outputs.append(weighed(scores / (nope + rope) ** 0.5, v, window))
        return outputs

    x = w["embedding.weight"][list(tokens)]
    for layer, window in enumerate(c.windows):
        part = f"blocks.{layer}."
        heads = grouped if c.latent is None else from_latents
        inner = norm(x, w[part + "attention_norm.weight"])
        outputs = heads(inner, part + "attention.", window)
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


Snapshot = tuple[tuple[int, ...], list[Tensor]]


def snapshot(cache: KVCache) -> Snapshot:
    """Lengths, and the storage as plain bytes: not-a-number is equal to itself then."""
    return cache.lengths, [x.contiguous().view(torch.uint8).clone() for x in cache.tensors]


def unchanged(cache: KVCache, before: Snapshot) -> bool:
    lengths, tensors = snapshot(cache)
    return lengths == before[0] and all(map(torch.equal, tensors, before[1]))


# ---- The visibility probe.


def probe_cache(rows: int, capacity: int, window: int | None = None) -> KVCache:
    """One layer, two KV heads, as wide as it is long: a value can name any position."""
    kind = LayerKind(2, capacity, capacity, torch.float64, window)
    return KVCache(CacheGroup(Contiguous(rows, capacity), DenseStore(kind, 1, rows, capacity)))


def recompute(rows: int, window: int | None = None) -> Recompute:
    """The same layer without a cache."""
    return Recompute(rows, [LayerKind(2, 6, 6, torch.float64, window)])


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
