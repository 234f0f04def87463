"""Formulas meet the instrument: bytes that operations read and write while the model runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_count_flops import configs, tokens

from kvbook.accounting import Traffic, step_traffic
from kvbook.config import ModelConfig
from kvbook.measure import count_bytes, count_traffic, model_groups
from kvbook.model.toy import toy_model
from kvbook.model.transformer import Transformer

# ---- The convention, one operation at a time: (what runs, bytes read, bytes written)

X = torch.ones(3, 4)  # 48 bytes
ROW = torch.ones(4)  # 16 bytes
TABLE = torch.ones(10, 4)  # 160 bytes
WHERE = torch.tensor([7, 7, 0])  # 24 bytes
TWO = torch.tensor([1, 2])  # 16 bytes


CONVENTION: dict[str, tuple[Callable[[], Any], int, int]] = {
    "each operand is read, each result written": (lambda: X + ROW, 64, 48),
    "an operand that is passed twice is read once": (lambda: X * X, 48, 48),
    "a product reads both matrices": (lambda: X @ TABLE.t(), 48 + 160, 120),
    "a view moves nothing": (lambda: X.t()[1:].unsqueeze(0).expand(5, -1, -1), 0, 0),
    "reshaping in place moves nothing": (lambda: X.reshape(2, 6), 0, 0),
    "reshaping with a copy reads and writes": (lambda: X.t().reshape(2, 6), 48, 48),
    "an expanded row is read once": (lambda: X.add(ROW.expand(3, 4)), 64, 48),
    "a slice is read, not its whole": (lambda: X[:, :2] + 1, 24, 24),
    "in place reads and writes": (lambda: X.mul_(1), 48, 48),
    "a copy does not read its target": (lambda: X.copy_(ROW), 16, 48),
    "filling writes": (lambda: X.fill_(1), 0, 48),
    "zeroing too": (lambda: X.clone().zero_(), 48, 48 + 48),
    "random numbers are written, uniform": (lambda: X.clone().uniform_(), 48, 48 + 48),
    "random numbers are written, normal": (lambda: X.clone().normal_(), 48, 48 + 48),
    "random numbers are written, whole": (lambda: X.clone().random_(), 48, 48 + 48),
    "out= is written only": (lambda: torch.add(X, 1, out=torch.empty(3, 4)), 48, 48),
    "an index reads what it takes": (lambda: TABLE[WHERE], 48 + 24, 48),
    "an embedding too": (lambda: torch.embedding(TABLE, WHERE), 48 + 24, 48),
    "index_select too": (lambda: TABLE.index_select(0, WHERE), 48 + 24, 48),
    "scattering writes what it replaces": (lambda: TABLE.index_put_((TWO,), ROW), 32, 32),
    "and reads it to add": (
        lambda: TABLE.index_put_((TWO,), ROW, accumulate=True), 32 + 32, 32
    ),
    "allocation moves nothing": (lambda: torch.empty(3, 4), 0, 0),
    "zeros are written": (lambda: torch.zeros(3, 4), 0, 48),
    "a shape is not read": (lambda: torch.zeros_like(X), 0, 48),
    "another dtype is another tensor": (lambda: X.bfloat16(), 48, 24),
    "reading a number on the host reads it": (lambda: X[0, 0].item(), 4, 0),
}  # fmt: skip


@pytest.mark.parametrize("rule", CONVENTION)
@pytest.mark.parametrize("inference", [False, True])
def test_the_convention(rule: str, inference: bool) -> None:
    run, read, written = CONVENTION[rule]
    with torch.inference_mode(inference):
        count = count_bytes(run)
    assert (count.read(), count.written()) == (read, written)
    assert count.total == read + written


def test_operations_are_named_and_the_largest_comes_first() -> None:
    count = count_bytes(lambda: (X.sum(), X + X, X * 2))
    assert count.by_operation() == {"add": (48, 48), "mul": (48, 48), "sum": (48, 4)}


# ---- Whose bytes


def test_bytes_belong_to_whoever_owns_the_storage_through_any_view() -> None:
    weights, cache = torch.ones(4, 4), torch.zeros(2, 10, 4)
    groups = {"weights": [weights], "cache": [cache]}

    def run() -> None:
        cache[1, 3:6] = X @ weights.t()

    count = count_bytes(run, groups)
    assert (count.read("weights"), count.written("weights")) == (64, 0)
    assert (count.read("cache"), count.written("cache")) == (0, 48)
    assert count.read("weights", "mm") == 64
    assert count.by_operation("activations") == {"mm": (48, 48), "copy_": (48, 0)}


def test_a_storage_has_one_owner() -> None:
    with pytest.raises(ValueError, match="groups 'a' and 'b' share a storage"):
        count_bytes(lambda: None, {"a": [X], "b": [X.t()]})


def test_every_weight_of_a_model_has_a_part() -> None:
    for changes in ({}, {"qkv_bias": True, "qk_norm": True, "tied_embeddings": False}):
        model = toy_model(**changes)
        grouped = [id(weight) for group in model_groups(model).values() for weight in group]
        assert sorted(grouped) == sorted(id(weight) for weight in model.parameters())


# ---- Formula = instrument


def test_a_decode_step_of_the_toy() -> None:
    """By hand, float64 (8 bytes): batch 2, five tokens cached, one new one per row."""
    model = toy_model()
    cache = model.new_cache(2, 16)
    model(tokens(model, 2, 5), cache)
    step = count_bytes(lambda: model(tokens(model, 2, 1), cache), model_groups(model, cache))
    traffic = count_traffic(step)
    assert traffic == Traffic(
        projections=4 * 4608 * 8,  # 4 layers: q and output 32 × 48 each, k and v 32 × 24 each
        mlp=4 * 6144 * 8,  # three matrices of 32 × 64
        norms=(4 * 2 + 1) * 32 * 8,
        head=64 * 32 * 8,
        embedding=2 * 32 * 8,  # two rows of the table
        cache_read=2 * 4 * 2 * 3 * 6 * 8 * 8,  # K and V, layers, rows, KV heads, tokens, width
        cache_write=2 * 4 * 2 * 3 * 1 * 8 * 8,
    )
    assert traffic == step_traffic(model.config, 1, 5, 2, "float64", "float64")


@settings(max_examples=25)
@given(
    config=configs(),
    dtype=st.sampled_from(["float32", "bfloat16", "float64"]),
    batch=st.integers(1, 3), P=st.integers(1, 12), T=st.integers(1, 3),
)  # fmt: skip
def test_the_formula_is_the_counter(
    config: ModelConfig, dtype: str, batch: int, P: int, T: int
) -> None:
    """Prefill and a step after it: weights once per batch, keys and values per sequence."""
    model = Transformer(config, getattr(torch, dtype))
    cache = model.new_cache(batch, P + T)
    for new, past in ((P, 0), (T, P)):
        inputs = tokens(model, batch, new)
        count = count_bytes(lambda x=inputs: model(x, cache), model_groups(model, cache))
        formula = step_traffic(config, new, past, batch, dtype, dtype)
        # A contiguous cache reads all of the past, the formula what the window lets be seen.
        unseen = 0 if config.window is None else max(0, past - (config.window - 1))
        width = config.n_kv_heads * config.head_dim * model.dtype.itemsize
        extra = 2 * config.n_layers * batch * unseen * width
        counted = count_traffic(count)
        assert counted.cache_read - formula.cache_read == extra
        assert counted.total - formula.total == extra
        assert counted.weights == formula.weights
        assert counted.embedding == formula.embedding
        assert counted.cache_write == formula.cache_write


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("S", [4, 40])
def test_what_the_formula_leaves_out_term_by_term(batch: int, S: int) -> None:
    """A decode step in float32 (4 bytes). The rest is activations, and none of it grows
    with S."""
    model = toy_model(dtype=torch.float32)
    cache = model.new_cache(batch, S + 2)
    model(tokens(model, batch, S), cache)
    inputs = tokens(model, batch, 1)
    step = count_bytes(lambda: model(inputs, cache), model_groups(model, cache))
    B, L, C, F, V, heads, kv_heads, D = batch, 4, 32, 64, 64, 6, 3, 8
    rest = step.by_operation("activations")
    # q, k, v and gate, up: a row in, the product out. The head, once.
    assert rest.pop("mm") == (
        4 * B * (L * 2 * C + C), 4 * B * (L * ((heads + 2 * kv_heads) * D + 2 * F) + V)
    )  # fmt: skip
    # Output and down: the residual and a row in, the residual out.
    assert rest.pop("addmm") == (4 * B * L * (C + heads * D + C + F), 4 * B * L * 2 * C)
    # Attention: queries in; out the result and one log-sum per head.
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert rest.pop(attention) == (4 * B * L * heads * D, 4 * B * L * heads * (D + 1))
    # The new keys and values on their way into the cache.
    assert rest.pop("copy_") == (4 * B * L * 2 * kv_heads * D, 0)
    # Token ids in (int64), their rows out.
    assert rest.pop("embedding") == (8 * B, 4 * B * C)
    # What is left is elementwise, in numbers moved, for 9 norms, 4 rotations of 9 heads (cosines
    # and sines are shared by the batch), 4 times silu(gate) · up.
    square, mean, add, root, times_root, times_weight = 64, 33, 2, 2, 65, 64
    norms = 9 * B * (square + mean + add + root + times_root + times_weight)
    roll, times_cosine, add_times_sine = 144, 144, 216
    rotations = 4 * (B * (roll + times_cosine + add_times_sine) + 2 * D)
    gates = 4 * B * (128 + 192)
    tables = 2 * 2 * D  # one row of cosines and one of sines
    # And in bytes of int64: one position made, clamped, then looked up twice.
    positions = 8 + 16 + 2 * 8
    left_over = sum(read + written for read, written in rest.values())
    assert left_over == 4 * (norms + rotations + gates + tables) + positions


def test_weights_are_read_once_for_all_rows_and_keys_for_each() -> None:
    model = toy_model()

    def step(batch: int) -> Traffic:
        cache = model.new_cache(batch, 8)
        model(tokens(model, batch, 7), cache)
        return count_traffic(
            count_bytes(lambda: model(tokens(model, batch, 1), cache), model_groups(model, cache))
        )

    one, five = step(1), step(5)
    assert five.weights == one.weights
    assert five.cache == 5 * one.cache


def test_without_a_cache_nothing_is_read_from_one() -> None:
    model = toy_model()
    inputs = tokens(model, 1, 5)
    traffic = count_traffic(count_bytes(lambda: model(inputs), model_groups(model)))
    assert traffic.cache == 0
    assert traffic.weights == step_traffic(model.config, 5, 0, 1, "float64").weights


def test_repeating_heads_in_memory_would_be_seen() -> None:
    """Queries that share a key read it once; a materialized repeat reads it for each."""
    q, k = torch.ones(1, 6, 1, 8), torch.ones(1, 3, 10, 8)
    groups = {"cache": [k]}
    folded = count_bytes(lambda: q.view(1, 3, 2, 8) @ k.transpose(2, 3), groups)
    repeated = count_bytes(lambda: q @ k.repeat_interleave(2, 1).transpose(2, 3), groups)
    assert folded.read("cache") == 960
    assert repeated.read() > 960 + 2 * 960
