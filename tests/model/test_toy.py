"""The book's toy: the same on every call, and without a weight that could be forgotten."""

import torch

from kvbook import toy_model


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
