"""Sampled text has the target's distribution: chi-square tests with stated power.

Texts of four tokens after one prompt, V = 4: 256 outcomes with exact chances. In a round of two
drafts every place is met: the first token comes without drafts, the next two are drafted, and the
last is a bonus or a replacement. Level: one false alarm in 10,000. Power: at least 0.999 for each
of the classic faults with the number of draws used, computed in the test.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracles.drafting import (
    FAULTS,
    Row,
    chances_of_texts,
    chi_square,
    expected_row,
    faulty_rule,
    power,
    tail,
)
from oracles.toys import reference_logits, toy

from kvbook.generate import (
    Draft,
    ModelDraft,
    PromptLookup,
    Sampler,
    accept_drafts,
    first_layers,
    one_hot,
    speculate,
)
from kvbook.generate.accept import draw
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
LEVEL, POWER, DRAWS = 1e-4, 0.999, 500
PROMPT, NEW, V = [1, 2], 4, 4
SMALL: dict[str, Any] = {"vocab_size": V, "tied_embeddings": False}
TARGET, OTHER = toy(seed=3, n_layers=1, **SMALL), toy(seed=15, n_layers=1, **SMALL)
DEEP = toy(seed=0, n_layers=2, **SMALL)
LIMITS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.5, "top_k": V, "top_p": 1.0},
    "top-k": {"temperature": 2.0, "top_k": 3, "top_p": 1.0},
    "top-p": {"temperature": 2.0, "top_k": V, "top_p": 0.8},
}
Fault = Callable[[Row, Row], list[float]]


def exact(
    target: Transformer,
    limits: dict[str, Any],
    draft: Transformer = OTHER,
    fault: Fault | None = None,
) -> dict[tuple[int, ...], float]:
    """Chances of all texts, by the formulas; with a fault in the two places that are drafted."""

    def row(begin: tuple[int, ...]) -> Sequence[float]:
        text = [*PROMPT, *begin]
        p = expected_row(reference_logits(target, text)[-1], **limits)
        if fault is None or len(begin) in (0, NEW - 1):
            return p
        return fault(p, expected_row(reference_logits(draft, text)[-1], **limits))

    return chances_of_texts(V, NEW, row)


def drawn(
    target: Transformer, draft: Any, limits: dict[str, Any], draws: int
) -> tuple[Counter[tuple[int, ...]], set[int]]:
    """Texts, and the numbers of accepted drafts that occurred."""
    sampler = Sampler(**limits, generator=torch.Generator().manual_seed(20))
    texts: Counter[tuple[int, ...]] = Counter()
    accepted: Counter[int] = Counter()
    for _ in range(draws):
        draft.reset()
        run = speculate(target, draft, PROMPT, NEW, 2, sampler)
        texts[tuple(run.tokens)] += 1
        accepted.update(run.accepted)
    return texts, set(accepted)


def model_draft(model: Transformer) -> ModelDraft:
    return ModelDraft(model, model.new_cache(1, 16))


DRAFTS: dict[str, tuple[Transformer, Callable[[], Draft]]] = {
    "a smaller model": (TARGET, lambda: model_draft(OTHER)),
    "first layers": (DEEP, lambda: model_draft(first_layers(DEEP, 1))),
    "prompt lookup": (TARGET, lambda: PromptLookup(V)),
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", DRAFTS)
def test_texts_have_the_targets_distribution(name: str, limits: str) -> None:
    target, make = DRAFTS[name]
    found, accepted = drawn(target, make(), LIMITS[limits], DRAWS)
    assert accepted >= {0, 1}
    statistic, freedom = chi_square(found, exact(target, LIMITS[limits]))
    assert freedom > 15
    assert tail(statistic, freedom) > LEVEL, (statistic, freedom)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_three_classic_faults_would_be_noticed(fault: str, limits: str) -> None:
    right = exact(TARGET, LIMITS[limits])
    wrong = exact(TARGET, LIMITS[limits], fault=FAULTS[fault])
    assert power(wrong, right, DRAWS, LEVEL) > POWER


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("fault", FAULTS)
def test_they_are_noticed(fault: str, limits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they do what their chances say: the same draws fit the faulty distribution."""
    monkeypatch.setattr("kvbook.generate.rounds.accept_drafts", faulty_rule(fault))
    found, _ = drawn(TARGET, model_draft(OTHER), LIMITS[limits], 300)
    assert tail(*chi_square(found, exact(TARGET, LIMITS[limits]))) < LEVEL
    wrong = exact(TARGET, LIMITS[limits], fault=FAULTS[fault])
    assert tail(*chi_square(found, wrong)) > LEVEL


# ---- The rule alone

P_AND_Q = [
    ([0.5, 0.5], [1.0, 0.0]),  # huggingface/transformers#28508
    ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]),
    ([0.7, 0.0, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]),
    ([0.05, 0.9, 0.05], [0.3, 0.4, 0.3]),
]


@pytest.mark.parametrize(("p", "q"), P_AND_Q)
def test_one_draft_gives_a_token_of_the_target(p: list[float], q: list[float]) -> None:
    """Accepted and final tokens within 3 sigma; for p = (1/2, 1/2) and q = (1, 0) in 20,000 draws,
    of which half stand."""
    draws = 20_000 if p == [0.5, 0.5] else 3000
    generator = torch.Generator().manual_seed(1)
    target, draft = torch.tensor([p, p]), torch.tensor([q])
    first: Counter[int] = Counter()
    stood = 0
    for token in torch.multinomial(draft[0], draws, True, generator=generator).tolist():
        accepted, following = accept_drafts(target, draft, [token], generator)
        first[token if accepted else following] += 1
        stood += accepted
    share = sum(min(a, b) for a, b in zip(p, q, strict=True))
    assert abs(stood - draws * share) < 3 * (draws * share * (1 - share)) ** 0.5 + 1e-9
    assert tail(*chi_square(first, dict(enumerate(p)))) > LEVEL
    for name, fault in FAULTS.items():
        if fault(p, q) != pytest.approx(p):  # some faults are right by chance for some p and q
            wrong, right = dict(enumerate(fault(p, q))), dict(enumerate(p))
            assert power(wrong, right, draws, LEVEL) > POWER, name


def test_a_certain_draft_stands_as_often_as_the_target_wants_it() -> None:
    """Prompt lookup: q is 1 for the token, and what is left of p is p without it."""
    generator, p = torch.Generator().manual_seed(2), [0.6, 0.1, 0.3]
    target, draft = torch.tensor([p, p]), one_hot([0], 3)
    outcomes: Counter[tuple[int, int]] = Counter()
    for _ in range(2000):
        accepted, following = accept_drafts(target, draft, [0], generator)
        outcomes[accepted, following] += 1
    chances = {(1, 0): 0.36, (1, 1): 0.06, (1, 2): 0.18, (0, 0): 0.0, (0, 1): 0.1, (0, 2): 0.3}
    assert tail(*chi_square(outcomes, chances)) > LEVEL


def test_the_bonus_comes_from_the_row_behind_the_last_draft() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0.1, 0.2, 0.3, 0.4]]
    bonus: Counter[int] = Counter()
    for _ in range(2000):
        accepted, following = accept_drafts(
            torch.tensor(rows), one_hot([0, 1, 2], V), [0, 1, 2], generator
        )
        assert accepted == 3
        bonus[following] += 1
    assert tail(*chi_square(bonus, dict(enumerate(rows[3])))) > LEVEL


def test_draws_follow_their_weights() -> None:
    generator, weights = torch.Generator().manual_seed(4), [0.1, 0.0, 0.3, 0.6]
    found = Counter(draw(torch.tensor(weights), generator) for _ in range(2000))
    assert tail(*chi_square(found, dict(enumerate(weights)))) > LEVEL
