"""The book's toy: the same on every call, and without a weight that could be forgotten."""

import os

import pytest
import torch
from oracles.toys import LATENT, SMALL, toy

from kvbook import toy_model
from kvbook.config import LatentConfig
from kvbook.model import toy as toy_file


def test_a_seed_gives_the_same_weights_and_leaves_the_callers_numbers_alone() -> None:
    torch.manual_seed(5)
    first = toy_model(3)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.rand(1) == drawn
    again, other = toy_model(3), toy_model(4)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_norm_weights_lie_on_both_sides_of_1() -> None:
    """With all ones, a forgotten norm weight could not be seen; nor one that is only below."""
    model = toy_model()
    norms = [w for name, w in model.named_parameters() if name.endswith("norm.weight")]
    assert len(norms) == 9
    for weight in norms:
        assert 0.5 <= weight.min() < 0.8
        assert 1.2 < weight.max() <= 1.5


# ---- Sizes that cannot be built


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": True},
        {"qkv_bias": True},
        {"qk_norm": True},
        {"n_layers": 3, "n_kv_heads": 1},
        LATENT,
        {"n_kv_heads": 4, "latent": LatentConfig(None, 5, 2, 4, 3)},
    ],
)
def test_the_parameters_of_a_shape_are_those_of_the_model(changes: dict[str, object]) -> None:
    model = toy(**changes)  # type: ignore[arg-type]
    assert model.config.parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_mlp",
     "max_positions"],
)  # fmt: skip
@pytest.mark.parametrize("value", [10**30, 2**63, 10**10])
def test_a_size_that_no_model_has_is_refused(name: str, value: int) -> None:
    words = r"a number of 100 bits" if value == 10**30 else f"{value:,}"
    with pytest.raises(ValueError, match=rf"{name} must be at most [\d,]+, got {words}"):
        toy_model(**{name: value})


def test_more_weights_than_memory_are_refused_before_any_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SMALL has 5,232 weights, 41,856 B in float64 and half of that in float32."""
    monkeypatch.setattr(toy_file, "TOY", SMALL)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 13_952}.get)
    assert toy_model().config.parameters == 5_232
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 41_855}.get)
    assert toy_model(dtype=torch.float32).dtype == torch.float32
    message = (
        r"make 5,232 weights, 41,856 B in torch\.float64, but this machine has 41,855 B of memory"
    )
    monkeypatch.setattr(toy_file, "Transformer", None)
    with pytest.raises(ValueError, match=message):
        toy_model()


@pytest.mark.parametrize("name", ["vocab_size", "d_model", "d_mlp"])
def test_the_size_to_change_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"memory; make {name} \(now 1,000,000,000\) smaller"):
        toy_model(**{name: 10**9})


def test_a_system_that_does_not_say_how_much_memory_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf_names")
    assert toy_model().config.parameters == 45_344
