"""Bytes that a forward pass must move, part by part.

Knows: each weight is read once per pass whatever the batch; each sequence's cache is its own.
Does not know: latent heads, activations, on-chip caches, how often a kernel really reads
something; these are the least bytes, so a time computed from them is a lower bound.
"""

from dataclasses import dataclass
from fractions import Fraction

from kvbook.accounting.flops import check_heads, visible_limits
from kvbook.accounting.formats import Format, parse_format
from kvbook.accounting.units import check_count
from kvbook.config import ModelConfig


@dataclass(frozen=True)
class Traffic:
    """Bytes by part, for the whole batch."""

    projections: int  # q, k, v, output, with their biases
    mlp: int
    norms: int
    head: int
    embedding: int  # the rows that were looked up
    cache_read: int
    cache_write: int

    @property
    def weights(self) -> int:
        """What a larger batch shares (the few embedding rows apart)."""
        return self.projections + self.mlp + self.norms + self.head

    @property
    def cache(self) -> int:
        """What every sequence adds."""
        return self.cache_read + self.cache_write

    @property
    def total(self) -> int:
        return self.weights + self.embedding + self.cache


def step_traffic(
    config: ModelConfig,
    T: int,
    past: int = 0,
    batch: int = 1,
    weights: str | Format = "bfloat16",
    cache: str | Format = "bfloat16",
) -> Traffic:
    """The least bytes of one pass of ``batch`` rows of T new tokens after ``past`` others.

    The new keys and values are written and then read with the others, as each token sees
    itself: a decode step at T = 1 reads past + 1 tokens of each sequence. A layer with a
    window reads what its queries see.

    Raises ``ValueError`` for a negative count, T or batch of 0, or an unknown dtype, and
    ``UnsupportedModelError`` for latent heads.
    """
    check_heads(config)
    check_count("T", T)
    check_count("past", past, 0)
    check_count("batch", batch)
    form, L = parse_format(weights), config.n_layers
    C, F, V = config.d_model, config.d_mlp, config.vocab_size
    query_width = config.n_heads * config.head_dim
    kv_width = config.n_kv_heads * config.head_dim

    qkv_rows = query_width + 2 * kv_width
    projections = matrix_bytes(form, qkv_rows, C) + matrix_bytes(form, C, query_width)
    projections += form.vector_bytes(qkv_rows) if config.qkv_bias else 0
    norms = 2 * form.vector_bytes(C)
    norms += 2 * form.vector_bytes(config.head_dim) if config.qk_norm else 0

    # Of the past, the first new query sees the most: all but one of what its layer allows.
    seen = [past if most is None else min(past, most - 1) for most in visible_limits(config)]
    vectors = 2 * config.n_kv_heads * batch  # a key and a value
    kv_bytes = parse_format(cache).vector_bytes(config.head_dim)
    return Traffic(
        projections=L * projections,
        mlp=L * (matrix_bytes(form, 2 * F, C) + matrix_bytes(form, C, F)),
        norms=L * norms + form.vector_bytes(C),
        head=matrix_bytes(form, V, C),
        embedding=batch * T * form.vector_bytes(C),
        cache_read=vectors * (sum(seen) + L * T) * kv_bytes,
        cache_write=vectors * L * T * kv_bytes,
    )


def matrix_bytes(form: Format, rows: int, columns: int) -> int:
    """A matrix, its groups of a scaled format running along the rows."""
    return rows * form.vector_bytes(columns)


def intensity(flops: int, moved_bytes: int) -> Fraction:
    """Arithmetic intensity: operations per byte, exactly."""
    check_count("flops", flops, 0)
    check_count("moved_bytes", moved_bytes)
    return Fraction(flops, moved_bytes)
