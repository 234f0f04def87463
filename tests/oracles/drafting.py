"""Draft-and-verify by hand: drafts that follow a script, the plain texts, and exact chances."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import erf, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from kvbook.generate import Proposal, Sampler
from kvbook.model.transformer import Transformer
from oracles.list_cache import ListCache
from oracles.toys import as_it_is, reference_logits

RoundTrip = Callable[[Tensor], Tensor]


def greedy_text(
    model: Transformer, prompt: Sequence[int], n: int, stored: RoundTrip = as_it_is
) -> list[int]:
    """The most likely token, n times, by the formulas of ``toys`` alone."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(reference_logits(model, tokens, stored)[-1].argmax()))
    return tokens[len(prompt) :]


class Scripted:
    """Proposes ``truth`` with one wrong token, in round r at place ``wrong[r]`` (the last repeats).

    A place beyond the drafts: all are right.
    """

    def __init__(self, vocab_size: int, truth: Sequence[int], wrong: Sequence[int]) -> None:
        self.vocab_size, self.truth, self.wrong = vocab_size, list(truth), list(wrong)
        self.text: list[int] = []
        self.before: Callable[[], None] = lambda: None  # called when drafts are asked for

    @property
    def length(self) -> int:
        return len(self.text)

    def check_room(self, tokens: int, k: int) -> None:
        """There is always room."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def truncate(self, length: int) -> None:
        self.text = self.text[:length]

    def propose(self, k: int, sampler: Sampler) -> Proposal:
        self.before()
        place = self.wrong.pop(0) if len(self.wrong) > 1 else self.wrong[0]
        tokens = self.truth[len(self.text) : len(self.text) + k]
        if place < len(tokens):
            tokens[place] = (tokens[place] + 1) % self.vocab_size
        rows = torch.zeros(len(tokens), self.vocab_size)
        for row, token in enumerate(tokens):
            rows[row, token] = 1.0
        return Proposal(tokens, rows)


def greedy_rounds(
    model: Transformer,
    memory: ListCache,
    prompt: Sequence[int],
    n: int,
    k: int,
    propose: Callable[[list[int], int], list[int]],
) -> list[int]:
    """The rounds once more over lists of keys, for stores in which the size of a step matters."""
    text, unread = list(prompt), list(prompt)
    while True:
        left = len(prompt) + n - len(text)
        drafts = propose(text, min(k, left - 1)) if text != list(prompt) else []
        logits = model(torch.tensor([unread + drafts]), memory)[0, -1 - len(drafts) :]
        wanted = logits.argmax(-1).tolist()
        right = 0
        while right < len(drafts) and drafts[right] == wanted[right]:
            right += 1
        text += wanted[: right + 1]
        memory.truncate([len(text) - 1])
        unread = text[-1:]
        if len(text) == len(prompt) + n:
            return text[len(prompt) :]


# ---- Chances


def expected_row(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    """What a sampler draws from, token by token, from its definition. No ties are expected."""
    weights = [float(x) for x in (logits.double() / temperature).softmax(-1)]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[:top_k]
    of_top_k = sum(weights[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        if reached < top_p:
            kept.append(token)
        reached += weights[token] / of_top_k
    total = sum(weights[token] for token in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(weights))]


def chances_of_texts(
    vocab_size: int, n: int, row: Callable[[tuple[int, ...]], Sequence[float]]
) -> dict[tuple[int, ...], float]:
    """Probability of each text of n tokens; ``row(begin)`` has those of the token after it."""
    tokens = range(vocab_size)
    rows = {begin: row(begin) for i in range(n) for begin in product(tokens, repeat=i)}
    return {
        text: prod(rows[text[:i]][text[i]] for i in range(n)) for text in product(tokens, repeat=n)
    }


def cells(
    chances: dict[Any, float], draws: int
) -> Iterator[tuple[list[Any], float]]:
    """Outcomes whose expected count is at least 5, one by one, and all others as one."""
    rare = [outcome for outcome, p in chances.items() if draws * p < 5]
    for outcome, p in chances.items():
        if draws * p >= 5:
            yield [outcome], p
    if sum(chances[outcome] for outcome in rare) > 0:
        yield rare, sum(chances[outcome] for outcome in rare)


def chi_square(
    found: Counter[Any], chances: dict[Any, float]
) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; infinite for an outcome of chance 0."""
    draws = found.total()
    if any(chances[outcome] == 0 for outcome in found):
        return float("inf"), 1
    groups = list(cells(chances, draws))
    statistic = sum(
        (sum(found[outcome] for outcome in group) - draws * p) ** 2 / (draws * p)
        for group, p in groups
    )
    return statistic, len(groups) - 1


def tail(statistic: float, freedom: int) -> float:
    """Chance of at least this statistic if nothing is wrong (Wilson and Hilferty 1931)."""
    if statistic == float("inf"):
        return 0.0
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / sqrt(spread)
    return 0.5 * (1 - erf(z / sqrt(2)))


def power(
    wrong: dict[Any, float], right: dict[Any, float], draws: int, level: float
) -> float:
    """Chance that a rule with chances ``wrong`` is noticed, by the noncentral statistic's normal
    approximation: mean f + s and variance 2 f + 4 s, s = draws · Σ (wrong - right)² / right."""
    if any(right[outcome] == 0 < p for outcome, p in wrong.items()):
        return 1.0
    groups = list(cells(right, draws))
    freedom = len(groups) - 1
    shift = draws * sum((sum(wrong[o] for o in group) - p) ** 2 / p for group, p in groups)
    critical = 0.0
    while tail(critical, freedom) > level:
        critical += 0.05
    z = (freedom + shift - critical) / sqrt(2 * freedom + 4 * shift)
    return 0.5 * (1 + erf(z / sqrt(2)))


# ---- The three classic faults of the rule, as chances of one token and as rules

Row = Sequence[float]


def left_of(p: Row, q: Row) -> list[float]:
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return [a / sum(left) for a in left] if sum(left) else list(p)


def always_accepted(p: Row, q: Row) -> list[float]:
    return list(q)


def resampled_from_p(p: Row, q: Row) -> list[float]:
    both = [min(a, b) for a, b in zip(p, q, strict=True)]
    return [stood + (1 - sum(both)) * a for stood, a in zip(both, p, strict=True)]


def accepted_by_p(p: Row, q: Row) -> list[float]:
    stood = [a * b for a, b in zip(p, q, strict=True)]
    rest = left_of(p, q)
    return [one + (1 - sum(stood)) * a for one, a in zip(stood, rest, strict=True)]


FAULTS: dict[str, Callable[[Row, Row], list[float]]] = {
    "always accept": always_accepted,
    "resample from p": resampled_from_p,
    "accept by p": accepted_by_p,
}


def faulty_rule(name: str) -> Callable[..., tuple[int, int]]:
    """``accept_drafts`` with one of the faults."""

    def rule(
        target: Tensor, draft: Tensor, drafted: Sequence[int], generator: torch.Generator
    ) -> tuple[int, int]:
        def drawn(weights: Tensor | Sequence[float]) -> int:
            weights = torch.as_tensor(weights, dtype=torch.float64)
            return int(torch.multinomial(weights, 1, generator=generator))

        for place, token in enumerate(drafted):
            p, q = target[place].double().tolist(), draft[place].double().tolist()
            chance = {"always accept": 1.0, "resample from p": p[token] / q[token],
                      "accept by p": p[token]}[name]  # fmt: skip
            if torch.rand(1, generator=generator).item() >= chance:
                return place, drawn(p if name == "resample from p" else left_of(p, q))
        return len(drafted), drawn(target[len(drafted)])

    return rule
