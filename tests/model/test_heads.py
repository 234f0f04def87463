"""Which KV head a query head reads, and what a layer computes: the formulas, written out."""

from typing import Any

import pytest
import torch
from oracles.toys import LATENT, reference_logits, text, toy

from kvbook.cache import KVView
from kvbook.model.attention import attend
from kvbook.model.influence import visibility

pytestmark = pytest.mark.usefixtures("one_thread")


def head_numbers(H: int, Hkv: int, T: int) -> list[float]:
    """The value of every key is the number of its KV head; return what each query head reads."""
    S, D = T + 2, 4
    values = torch.arange(Hkv, dtype=torch.float64)[None, :, None, None].expand(1, Hkv, S, D)
    view = KVView(torch.randn(1, Hkv, S, D, dtype=torch.float64), values, torch.arange(S)[None])
    out = attend(torch.randn(1, H, T, D, dtype=torch.float64), view, 1.0)
    assert out.shape == (1, H, T, D)
    read = [out[0, head].unique().tolist() for head in range(H)]
    rounded = [sorted({round(x, 12) for x in values}) for values in read]
    assert all(len(values) == 1 for values in rounded), "a query head mixed two KV heads"
    return [values[0] for values in rounded]


@pytest.mark.parametrize("T", [1, 3], ids=["decode", "chunk"])
def test_neighboring_query_heads_share_a_kv_head(T: int) -> None:
    """apple/axlearn#842, onnx/onnx#7274, ekzhang/jax-js#180, PSAL-POSTECH/ONNXim#34.

    Tiling instead of repeating gives 0, 1, 0, 1. With one KV head, or one per query head, both
    give the same: only the case between can tell.
    """
    assert head_numbers(4, 2, T) == [0, 0, 1, 1]
    assert head_numbers(6, 3, T) == [0, 0, 1, 1, 2, 2]
    assert head_numbers(6, 2, T) == [0, 0, 0, 1, 1, 1]
    assert head_numbers(9, 3, T) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("T", [1, 3], ids=["decode", "chunk"])
def test_every_kv_head_is_reached(T: int) -> None:
    """Dividing the head number by the number of KV heads would reach only 0 … 3 of 8."""
    assert head_numbers(32, 8, T) == [
        0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,
        4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7,
    ]  # fmt: skip


@pytest.mark.parametrize("T", [1, 3], ids=["decode", "chunk"])
def test_one_kv_head_for_all_and_one_for_each(T: int) -> None:
    assert head_numbers(4, 1, T) == [0, 0, 0, 0]
    assert head_numbers(4, 4, T) == [0, 1, 2, 3]


def test_attention_by_hand() -> None:
    """Scores 1 and 2 at scale 1/2: weights e^0.5 and e^1, divided by their sum."""
    keys = torch.tensor([[[[1.0, 0.0], [2.0, 0.0]]]], dtype=torch.float64)
    values = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    query = torch.tensor([[[[1.0, 5.0]]]], dtype=torch.float64)
    out = attend(query, KVView(keys, values, torch.arange(2)[None]), 0.5)
    # e^0.5 = 1.6487212707, e = 2.7182818285
    assert out.flatten().tolist() == pytest.approx([0.3775406688, 0.6224593312], abs=1e-10)


VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one head for all": {"n_kv_heads": 1},
    "one head for each": {"n_kv_heads": 4},
    "tied head": {"tied_embeddings": True},
    "bias on q, k and v": {"qkv_bias": True},
    "norm on q and k": {"qk_norm": True},
    "window of 3": {"window": 3},
    "window of 3 and 2 sinks": {"window": 3, "sinks": 2},
    "a window in every other layer": {"n_layers": 3, "window": (3, None, 3)},
    "one latent for all": LATENT,
    "three layers": {"n_layers": 3},
    "wide heads": {"head_dim": 10},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_model_follows_its_formulas(name: str) -> None:
    """Against ``toys.reference_logits``, which shares no code with the package."""
    model, tokens = toy(**VARIANTS[name]), text(9)
    expected = reference_logits(model, tokens)
    assert expected.std() > 1
    assert (model(torch.tensor([tokens]))[0] - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", VARIANTS)
def test_so_does_one_token_at_a_time(name: str) -> None:
    model, tokens = toy(**VARIANTS[name]), text(9)
    cache = model.new_cache(1, 9)
    steps = [model(torch.tensor([[token]]), cache)[0, 0] for token in tokens]
    assert (torch.stack(steps) - reference_logits(model, tokens)).abs().max() < 1e-9


def test_the_last_position_alone_has_the_same_logits() -> None:
    model, tokens = toy(), torch.tensor([text(7), text(7, seed=1)])
    last = model(tokens, last_only=True)
    assert last.shape == (2, 1, 29)
    assert (last - model(tokens)[:, -1:]).abs().max() < 1e-12


def test_asking_for_the_last_position_fills_the_cache_all_the_same() -> None:
    model = toy()
    whole, last = model.new_cache(1, 8), model.new_cache(1, 8)
    model(torch.tensor([text(7)]), whole)
    model(torch.tensor([text(7)]), last, last_only=True)
    assert last.lengths == (7,)
    assert last.groups[0].store.keys.equal(whole.groups[0].store.keys)
    assert last.groups[0].store.values.equal(whole.groups[0].store.values)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6])
def test_who_sees_whom_is_asked_for_whole_groups_of_heads(heads: int) -> None:
    keys = torch.zeros(1, 4, 3, 2, dtype=torch.float64)  # four KV heads
    view = KVView(keys, keys, torch.arange(3)[None])
    with pytest.raises(ValueError, match=rf"multiple of the 4 KV heads of the view, got {heads}"):
        visibility(view, heads, 1)
    assert visibility(view, 8, 1).shape == (1, 8, 1, 3)
