"""What both machines share: a model, its referees, and how an operation is run."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from oracles.cache_kinds import STORES
from torch import Tensor

from fuzz.case import Case, Op
from fuzz.kinds import PLACED, promise
from fuzz.models import build
from fuzz.tally import Tally
from fuzz.watch import close, unique_writes
from fuzz.written_out import Text
from kvbook.errors import CacheFullError, UnfinishedStepError
from kvbook.model.transformer import Transformer

Given = dict[str, object]
# What is written where no token is.
VALUES = {"not a number": float("nan"), "large": 1e10, "infinity": float("inf")}
# What a use of an unfinished step raises. Lengths are those of the pass that failed, so a step may
# have no room as well.
UNFINISHED = (UnfinishedStepError, CacheFullError)


class Crash(BaseException):
    """What goes wrong in the middle of a forward pass. Nobody's ``except Exception`` hides it."""


class Machine:
    """Runs the operations of one case; an operation is the method ``do_<name>``."""

    WEIGHTS: ClassVar[dict[str, int]] = {}  # how often each operation is drawn

    def __init__(self, case: Case, tally: Tally) -> None:
        self.case, self.tally = case, tally
        self.built = build(case.family, case.config, case.seed)
        self.model = self.built.model
        self.promise = promise(case.placed, case.stored)
        self.cache = PLACED[case.placed].new(self.model, case.sizes, STORES[case.stored])
        self.passes = 0
        self.layers = self.model.config.n_layers
        self.vocab = self.model.config.vocab_size

    def run(self, op: Op) -> None:
        self.tally.operations[op.name] += 1
        with unique_writes():
            getattr(self, "do_" + op.name)(**op.given)
        self.check()

    def check(self) -> None:
        raise NotImplementedError

    def new_text(self) -> Text:
        self.tally.sequences += 1
        return Text(self.built.weights, self.promise)

    def random_tokens(self, seed: int, rows: int, T: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.vocab, (rows, T), generator=generator).tolist()

    def forward(
        self, tokens: list[list[int]], counts: Sequence[int], last: bool = False
    ) -> Tensor:
        """One forward pass; every third is run in inference mode."""
        self.tally.forwards += 1
        self.passes += 1
        with torch.inference_mode(self.passes % 3 == 0):
            return self.model(
                torch.tensor(tokens), self.cache, counts=list(counts), last_only=last
            )

    def judge(self, what: str, text: Text, new: list[int], found: Tensor, turn: int,
              pure: bool = True) -> None:
        """``found`` (T, V) for the new tokens of one text, by everything that knows better.

        ``pure`` says that all of the text was computed with the present weights.
        """
        expected = text.step(self.built.weights, new)
        close(f"{what}, by the formulas", found, expected[-len(found) :] if new else expected)
        if not (new and pure and self.promise.exact):
            return
        self.tally.recomputed += 1
        again = self.built.recomputed(text.tokens)
        close(f"{what}, by a recompute", found, again[-len(found) :])
        if turn % 3 == 0:  # the slowest of them
            known = self.built.by_the_library(text.tokens)
            if known is not None:
                self.tally.library += 1
                close(f"{what}, by transformers", found, known[-len(found) :])

    def crash(self, tokens: list[list[int]], counts: Sequence[int], layer: int, late: bool) -> None:
        """A forward pass that fails in one layer: after its keys were stored, or before."""
        self.tally.forwards += 1
        with failing(self.model, layer, late):
            try:
                self.model(torch.tensor(tokens), self.cache, counts=list(counts))
            except Crash:
                return
        raise AssertionError("the forward pass should have failed")


@contextmanager
def failing(model: Transformer, layer: int, late: bool) -> Iterator[None]:
    def fail(*inputs: Any) -> Tensor:
        raise Crash

    attention = model.blocks[layer].attention
    if late:
        working, attention.attend = attention.attend, fail
        try:
            yield
        finally:
            attention.attend = working
        return
    hook = attention.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def saved_and_loaded(whole: Any) -> Any:
    file = io.BytesIO()
    torch.save(whole, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda whole: pickle.loads(pickle.dumps(whole)),
    "torch.save": saved_and_loaded,
}


def fitted(numbers: Sequence[int], n: int) -> list[int]:
    """As many numbers as there are rows: cut, or over again."""
    return [numbers[i % len(numbers)] for i in range(n)]
