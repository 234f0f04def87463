"""The acceptance rule on small distributions: every index of rejection, forced; and its refusals.

What is drawn at random is held against exact chances in test_accept_chances.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbook.generate.accept import Acceptance, accept_drafts, one_hot

V = 5
NAN = float("nan")


def rows(*weights: list[float]) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- At temperature 0: rows of one token


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("wrong", range(5))
def test_greedy_drafts_stand_up_to_the_first_wrong_one(k: int, wrong: int) -> None:
    """The target wants 0 1 2 3 4; draft ``wrong`` is another token, or none is."""
    wanted = [0, 1, 2, 3, 4][: k + 1]
    drafted = wanted[:k]
    if wrong < k:
        drafted[wrong] = (drafted[wrong] + 1) % V
    found = accept_drafts(one_hot(wanted, V), one_hot(drafted, V), drafted)
    accepted = min(wrong, k)
    assert found == Acceptance(accepted, wanted[accepted])


def test_a_right_draft_behind_a_wrong_one_does_not_count() -> None:
    found = accept_drafts(one_hot([0, 1, 2, 3], V), one_hot([0, 4, 2], V), [0, 4, 2])
    assert found == (1, 1)


# ---- Every index of rejection, forced by zeros of the target


@pytest.mark.parametrize("k", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_the_row_of_the_first_rejection_gives_the_next_token(k: int, seed: int) -> None:
    """Row i of the target can only be token i or token 10 + i; drafts are sure of token i."""
    drafted = list(range(k))
    draft = one_hot(drafted, 20)
    for falls in range(k + 1):
        target = one_hot([*drafted, 10 + k], 20)
        if falls < k:
            target[falls] = one_hot([10 + falls], 20)[0]
        assert accept_drafts(target, draft, drafted, seeded(seed)) == (falls, 10 + falls)


def test_a_draft_that_the_target_likes_better_always_stands() -> None:
    """p(x) >= q(x): nothing is left to chance."""
    p, q = [0.5, 0.5, 0.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0, 0.0]
    for seed in range(50):
        for token in (0, 1):
            assert accept_drafts(rows(p, p), rows(q), [token], seeded(seed)).accepted == 1
        # Token 2 never stands, and what q leaves of p is token 1 alone.
        assert accept_drafts(rows(p, p), rows(q), [2], seeded(seed)) == (0, 1)


def test_a_draft_of_the_targets_own_distribution_always_stands() -> None:
    p = torch.rand(7, V, generator=seeded(0)).softmax(-1)
    for seed in range(50):
        assert accept_drafts(p, p[:6], [0, 1, 2, 3, 4, 0], seeded(seed)).accepted == 6


def test_nothing_may_be_left_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """p(x) is one unit in the last place below q(x), and no other probability is above."""
    p, q = rows([0.5, 0.5], [0.5, 0.5]), rows([0.5, 0.5])
    p[0, 0] -= 2.0**-54
    monkeypatch.setattr(torch, "rand", lambda *_, **__: rows([1 - 2.0**-53])[0])
    assert accept_drafts(p, q, [0], seeded(0)) in [(0, 0), (0, 1)]


def test_without_drafts_it_is_a_draw_from_the_target() -> None:
    assert accept_drafts(one_hot([3], V), torch.zeros(0, V), []) == (0, 3)
    drawn = [
        accept_drafts(rows([0.5, 0, 0.5, 0, 0]), torch.zeros(0, V), [], seeded(seed)).next_token
        for seed in range(40)
    ]
    assert set(drawn) == {0, 2}


# ---- Chance


def test_the_generator_alone_decides() -> None:
    p = torch.rand(4, V, generator=seeded(0)).softmax(-1)
    q = torch.rand(3, V, generator=seeded(1)).softmax(-1)
    told = [accept_drafts(p, q, [0, 1, 2], seeded(seed)) for seed in range(60)]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert told == [accept_drafts(p, q, [0, 1, 2], seeded(seed)) for seed in range(60)]
    assert torch.get_rng_state().equal(state)
    assert len(set(told)) > 5


def test_a_call_takes_as_much_chance_however_many_drafts_stand() -> None:
    """So what comes later does not depend on where a draft fell."""
    after = set()
    for drafted in ([0, 1, 2], [1, 1, 2], [0, 1, 1]):
        generator = seeded(3)
        accept_drafts(one_hot([0, 1, 2, 3], V), one_hot(drafted, V), drafted, generator)
        after.add(torch.rand(1, generator=generator).item())
    assert len(after) == 1


def test_inputs_stay_as_they_are() -> None:
    p, q = rows([0.25, 0.75], [1.0, 0.0]), rows([0.75, 0.25])
    before = p.clone(), q.clone()
    accept_drafts(p, q, [0], seeded(0))
    assert p.equal(before[0])
    assert q.equal(before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_of_any_float_are_taken(dtype: torch.dtype) -> None:
    p = rows([0.25, 0.75], [0.0, 1.0]).to(dtype)
    assert accept_drafts(p, one_hot([1], 2).to(dtype), [1], seeded(0)).next_token in (0, 1)


# ---- Refused by name

P, Q = one_hot([0, 1, 2], V), one_hot([0, 1], V)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": P[:2]}, r"\(3, V\) from the target .* got torch.float32 of \(2, 5\)"),
        ({"target": P[:, :4]}, r"of \(3, 4\) and"),
        ({"target": P[None]}, r"of \(1, 3, 5\) and"),
        ({"target": torch.tensor(1.0)}, r"of \(\) and"),
        ({"target": P[:, :0], "draft": Q[:, :0]}, r"of \(3, 0\) and"),
        ({"draft": Q[:1]}, r"\(2, V\) from the draft, .* and torch.float32 of \(1, 5\)"),
        ({"draft": Q.long()}, r"and torch.int64 of \(2, 5\)"),
        ({"target": P.long()}, r"got torch.int64 of \(3, 5\)"),
        ({"drafted": [0]}, "1 drafted tokens need"),
        ({"drafted": [0, 5]}, "integers from 0 to 4, got 5"),
        ({"drafted": [0, -1]}, "integers from 0 to 4, got -1"),
        ({"drafted": [0, True]}, "got True"),
        ({"drafted": [0, 1.0]}, "got 1.0"),
        ({"drafted": torch.tensor([0, 1])}, "drafted must be a list"),
        ({"drafted": [0, 2]}, r"drafted\[1\] is 2, to which row 1 .* probability 0"),
        ({"target": P * NAN}, "row 0 of the target's probabilities holds not-a-number"),
        ({"draft": Q.index_fill(0, torch.tensor(1), NAN)}, "row 1 of the draft's .* not-a-number"),
        ({"target": P * 2}, "row 0 of the target's .* sums to 2"),
        ({"draft": Q / 2}, "row 0 of the draft's .* sums to 0.5"),
        ({"target": P * float("inf")}, "row 0 of the target's"),
        ({"target": P + rows([0.5, -0.5, 0, 0, 0])}, "has -0.5 as its least and sums to 1"),
        ({"target": None}, "target must be a Tensor"),
        ({"draft": [[1.0]]}, "draft must be a Tensor"),
    ],
)  # fmt: skip
def test_what_is_no_distribution_is_refused(changes: dict[str, Any], words: str) -> None:
    generator = seeded(0)
    before = generator.get_state()
    arguments: dict[str, Any] = {"target": P, "draft": Q, "drafted": [0, 1], **changes}
    with pytest.raises(ValueError, match=words):
        accept_drafts(**arguments, generator=generator)
    assert generator.get_state().equal(before)


@pytest.mark.parametrize("generator", [5, "cpu", [torch.Generator()]], ids=["int", "str", "list"])
def test_chance_comes_from_one_generator(generator: Any) -> None:
    with pytest.raises(ValueError, match="generator must be a Generator"):
        accept_drafts(P, Q, [0, 1], generator)


@pytest.mark.parametrize(
    ("tokens", "size", "words"),
    [([5], 5, "got 5"), ([True], 5, "got True"), (3, 5, "got 3"), ([0], 0, "got 0")],
)  # fmt: skip
def test_one_hot_takes_tokens_of_the_vocabulary(tokens: Any, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        one_hot(tokens, size)
