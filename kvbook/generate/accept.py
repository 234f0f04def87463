"""Which drafted tokens stand, so that the text is the target's own.

Knows: probabilities, drafted tokens, chance. Does not know: models, caches, how drafts are made.

A drafted token x stands with probability min(1, p(x) / q(x)), p being the target's distribution
at its place and q the draft's. The first one that falls is replaced by a draw from what q leaves
of p, max(p - q, 0), normalized; if none falls, one more is drawn from the target's last row. Then
every token has the target's distribution, whatever the draft. (Leviathan et al. 2023, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbook.cache.sizes import check_class, check_list, check_sizes
from kvbook.generate.sampling import check_device

SUM = 1e-3  # how far from 1 the probabilities of one row may add up, for what float32 rounds


class Acceptance(NamedTuple):
    """How many drafted tokens stand, and the token that follows them."""

    accepted: int
    next_token: int


def accept_drafts(
    target: Tensor,
    draft: Tensor,
    drafted: Sequence[int],
    generator: torch.Generator | None = None,
) -> Acceptance:
    """Judge ``drafted``, a list of k tokens; the text goes on with the first ``accepted`` of them
    and then ``next_token``.

    ``target`` (k + 1, V) holds the target's probabilities: row i is what it expects after the
    text and the first i drafts. ``draft`` (k, V): row i is the distribution that ``drafted[i]``
    was drawn from, 1 for the token itself if nothing was drawn (``one_hot`` makes such rows). Both
    are what a sampler draws from, temperature and limits applied: at temperature 0 a row is 1 for
    one token, and the drafts stand as long as they are the target's choice. With k = 0 this is a
    draw from the target.

    Computed in float64. Takes k uniform numbers and one draw from ``generator``, however many
    drafts stand. Raises ``ValueError`` for other shapes, rows that are no distribution, and a
    drafted token that its row calls impossible.

    >>> target = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    >>> accept_drafts(target, one_hot([1, 0], 3), [1, 0])  # 1 was expected, and then 2
    Acceptance(accepted=1, next_token=2)
    """
    p, q = _checked(target, draft, drafted)
    if generator is not None:
        check_class("generator", generator, torch.Generator, "seeded([1])[0] makes one")
    check_device(generator, p)
    k = len(drafted)
    chance = torch.rand(k, generator=generator, dtype=torch.float64, device=p.device)
    expected, proposed = p[range(k), drafted], q[range(k), drafted]  # (k,)
    stands = (chance * proposed < expected).tolist()
    accepted = stands.index(False) if False in stands else k
    if accepted == k:
        return Acceptance(k, draw(p[k], generator))
    left = (p[accepted] - q[accepted]).clamp(min=0.0)
    # Where the two are equal but for rounding, nothing may be left; then either is the target.
    return Acceptance(accepted, draw(left if left.any() else p[accepted], generator))


def one_hot(tokens: Sequence[int], vocab_size: int) -> Tensor:
    """Rows (k, V), float32, of drafts that were not drawn: 1 for the token itself.

    >>> one_hot([2], 4)
    tensor([[0., 0., 1., 0.]])
    """
    check_sizes(vocab_size=vocab_size)
    check_list("tokens", tokens)
    _check_tokens("tokens", tokens, vocab_size)
    rows = torch.zeros(len(tokens), vocab_size)
    rows[range(len(tokens)), tokens] = 1.0
    return rows


def draw(weights: Tensor, generator: torch.Generator | None = None) -> int:
    """A token, with chances in proportion to ``weights`` (V,)."""
    return int(torch.multinomial(weights.double(), 1, generator=generator))


def _checked(target: Tensor, draft: Tensor, drafted: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Both in float64 on the target's device, rows summing to 1; or ``ValueError``."""
    check_class("target", target, Tensor, "probabilities (k + 1, V)")
    check_class("draft", draft, Tensor, "probabilities (k, V)")
    check_list("drafted", drafted)
    k = len(drafted)
    shapes = tuple(target.shape), tuple(draft.shape)
    floats = target.is_floating_point() and draft.is_floating_point()
    V = target.shape[-1] if target.ndim else 0
    if not floats or V == 0 or shapes != ((k + 1, V), (k, V)):
        raise ValueError(
            f"{k} drafted tokens need floats of shape ({k + 1}, V) from the target and ({k}, V) "
            f"from the draft, got {target.dtype} of {shapes[0]} and {draft.dtype} of {shapes[1]}; "
            "take the rows after the text and after each draft"
        )
    _check_tokens("drafted tokens", drafted, V)
    p = _distributions("target", target)
    q = _distributions("draft", draft.to(target.device))
    drawn = (q[range(k), drafted] > 0).tolist()
    if not all(drawn):
        place = drawn.index(False)
        raise ValueError(
            f"drafted[{place}] is {drafted[place]}, to which row {place} of the draft gives "
            "probability 0, so it was not drawn from there; give the row that it was drawn from"
        )
    return p, q


def _check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} must be integers from 0 to {vocab_size - 1}, got {token!r:.60}; draft and "
                "target need one vocabulary"
            )


def _distributions(name: str, rows: Tensor) -> Tensor:
    """Rows in float64 that sum to 1. Raises ``ValueError`` unless they nearly do already."""
    rows = rows.double()
    sums = rows.sum(-1, keepdim=True)
    good = ((rows >= 0).all(-1) & ((sums[:, 0] - 1).abs() < SUM)).tolist()
    if not all(good):
        row = good.index(False)
        found = (
            "holds not-a-number" if rows[row].isnan().any()
            else f"has {rows[row].min().item():.6g} as its least and sums to {sums[row].item():.6g}"
        )
        raise ValueError(
            f"row {row} of the {name}'s probabilities {found}, but they must be from 0 on and sum "
            "to 1; Sampler.probabilities() makes them from logits"
        )
    return rows / sums
