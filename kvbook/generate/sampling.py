"""From logits to the next token.

Knows: logits of one position per row. Does not know: models, caches, text.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbook.model.target import usable_device

REACHED = 1 - 1e-9  # a running sum of rounded probabilities reaches p if it reaches this part of it


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen.

    ``temperature`` 0 takes the most likely token, the first one of equals. Above 0 the logits are
    divided by it, the ``top_k`` most likely tokens are kept, of these the smallest set whose
    probability reaches ``top_p`` (the most likely token is always in it), and one is drawn. Equal
    tokens are kept in order of their ids, and a sum that misses ``top_p`` by no more than one part
    in 10^9 has reached it: of ten equal tokens, 0.8 keeps eight, whatever the sum rounds to.

    ``generator`` is one for all rows, or a list with one for each row, as ``seeded`` makes it.
    With one for all, what a row draws depends on the rows before it; with its own, a row draws
    the same beside any others. It is on the device of the logits.

    A logit of +infinity is certain; several share alike. Raises ``ValueError`` for settings out
    of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    generator: torch.Generator | Sequence[torch.Generator] | None = None

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not 0.0 <= self.temperature <= sys.float_info.max:
            raise ValueError(
                f"temperature must be 0 (greedy) or above, got {self.temperature!r:.60}"
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(
                f"top_k must be an integer of at least 1, or None for all, got {self.top_k!r:.60}"
            )
        if not is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r:.60}")
        if self.generator is None or isinstance(self.generator, torch.Generator):
            return
        rows = self.generator
        whole = isinstance(rows, list | tuple) and len(rows) > 0
        if not whole or not all(isinstance(one, torch.Generator) for one in rows):
            raise ValueError(
                "generator must be a torch.Generator, a list of them with one for each row, or "
                f"None, got {rows!r:.60}; seeded([1, 2]) makes a list"
            )
        if len(set(rows)) < len(rows):
            raise ValueError(
                f"each row needs a generator of its own, but of {len(rows)} only "
                f"{len(set(rows))} are different; seeded([1, 1]) makes two that draw alike"
            )
        object.__setattr__(self, "generator", tuple(rows))

    def __call__(self, logits: Tensor) -> Tensor:
        """Next tokens (B,), int64, from logits (B, V).

        Raises ``ValueError`` for a row that holds not-a-number or nothing but −infinity, at any
        temperature. One truth value is read back for that, once per call: on an accelerator the
        host waits here for the logits, as reading the token does anyway.
        """
        if self.temperature == 0.0:
            return self._most_likely(logits)
        weights = self.probabilities(logits)
        given = self.generator
        if given is None or isinstance(given, torch.Generator):
            check_device(given, logits)
            return torch.multinomial(weights, 1, generator=given)[:, 0]
        if len(given) != len(weights):
            raise ValueError(
                f"got {len(weights)} rows of logits, but {len(given)} generators; give one to "
                "each row, or a single one for all"
            )
        for own in given:
            check_device(own, logits)
        rows = zip(weights, given, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in rows])

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that is drawn from, (B, V), rows summing to 1.

        At temperature 0 it is 1 for the token that is taken. Computed in float64, returned in
        float32. Raises ``ValueError`` as a call does.

        >>> Sampler(temperature=1.0, top_k=2).probabilities(torch.tensor([[0.0, 0.0, -9.0]]))
        tensor([[0.5000, 0.5000, 0.0000]])
        """
        if self.temperature == 0.0:
            chosen = self._most_likely(logits)[:, None]
            return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, chosen, 1.0)
        check_shape(logits)
        ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
        largest = ordered[:, :1]
        check_numbers(largest, logits)
        # The largest becomes 0 before the division: at a tiny temperature the rest overflow to
        # minus infinity, which is their limit, and nothing overflows upwards. Infinity minus
        # itself is not a number, hence the 0 is written.
        ordered = torch.where(ordered == largest, 0.0, ordered - largest) / self.temperature
        if self.top_k is not None:
            ordered[:, min(self.top_k, ordered.shape[1]) :] = float("-inf")
        weights = ordered.softmax(-1)
        if self.top_p < 1.0:  # at 1 every token stays, whatever the running sum rounds to
            before = weights.cumsum(-1) - weights  # probability of all more likely tokens
            weights = weights.masked_fill(before >= self.top_p * REACHED, 0.0)
            weights = weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(weights).scatter(-1, tokens, weights).float()

    def _most_likely(self, logits: Tensor) -> Tensor:
        """The first of the largest logits, (B,)."""
        check_shape(logits)
        chosen = logits.argmax(-1)
        check_numbers(logits.gather(-1, chosen[:, None]), logits)
        return chosen


def seeded(seeds: Sequence[int], device: torch.device | str = "cpu") -> list[torch.Generator]:
    """A generator for each row. Raises ``ValueError`` unless seeds are from 0 to 2^63 − 1.

    >>> sampler = Sampler(temperature=1.0, generator=seeded([7, 8, 7]))
    >>> first, _, third = sampler(torch.zeros(3, 1000)).tolist()
    >>> first == third
    True
    """
    if not isinstance(seeds, list | tuple | range) or not seeds:
        raise ValueError(f"seeds must be a list with one integer for each row, got {seeds!r:.60}")
    for seed in seeds:
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ValueError(f"a seed must be an integer from 0 to 2**63 - 1, got {seed!r:.60}")
    where = usable_device(device)
    return [torch.Generator(where).manual_seed(seed) for seed in seeds]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_shape(logits: Tensor) -> None:
    if not isinstance(logits, Tensor):
        raise ValueError(f"logits must be a tensor of shape (B, V), got {logits!r:.60}")
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floats of shape (B, V), got {logits.dtype} of {tuple(logits.shape)}; "
            "take those of the last position, logits[:, -1]"
        )


def check_device(generator: torch.Generator | None, logits: Tensor) -> None:
    if generator is not None and generator.device.type != logits.device.type:
        raise ValueError(
            f"the generator is on {generator.device}, but the logits are on {logits.device}; "
            f"make it with torch.Generator({logits.device.type!r})"
        )


def check_numbers(largest: Tensor, logits: Tensor) -> None:
    """``largest``, (B, 1), is the largest of each row, which not-a-number counts as."""
    if not (largest > float("-inf")).all():
        row = int((~(largest > float("-inf")))[:, 0].nonzero()[0])
        found = "not-a-number" if largest[row].isnan().any() else "nothing but minus infinity"
        raise ValueError(
            f"the logits of row {row} of {len(logits)} hold {found}, so no token can be chosen; "
            "look for the first layer whose output is not finite"
        )


greedy = Sampler()
