"""What people do to a cache between two steps, for every placement and store.

A schedule of even and ragged steps is run with one action between two of them. Afterwards the
logits are those of a cache that nothing happened to, bit for bit unless said otherwise, or the
next use is refused by name and the cache is whole again after what the error says. Nothing in
between.
"""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from itertools import product

import pytest
import torch
from oracles.cache_kinds import PLACEMENTS, STORES, fits, model_of
from oracles.toys import snapshot, text, unchanged
from torch import Tensor, nn

from kvbook.cache import KVCache
from kvbook.errors import UnfinishedStepError
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, WINDOWS = "two query heads share one", "2 local : 1 global"
STEPS = [[5, 5], [1, 1], [2, 0], [1, 3]]  # new tokens of two rows
CASES = [
    (placed, stored)
    for placed, stored in product(PLACEMENTS, STORES)
    if fits(PLACEMENTS[placed], STORES[stored], model_of(HEADS, WINDOWS))
]
every_cache = pytest.mark.parametrize(("placed", "stored"), CASES)
every_point = pytest.mark.parametrize("at", [1, 3])  # before an even step and a ragged one


def made(placed: str, stored: str) -> tuple[Transformer, KVCache]:
    model = model_of(HEADS, WINDOWS)
    return model, PLACEMENTS[placed].new(model, 2, 24, STORES[stored])


def inputs(index: int) -> tuple[Tensor, list[int]]:
    counts = STEPS[index]
    T = max(counts)
    return torch.tensor([text(T, 10 * index), text(T, 10 * index + 1)]), counts


def step(model: Transformer, cache: KVCache, index: int) -> Tensor:
    """The logits of real tokens."""
    tokens, counts = inputs(index)
    logits = model(tokens, cache, counts=counts)
    T = tokens.shape[1]
    return torch.cat([logits[row, T - count :] for row, count in enumerate(counts)])


def untouched(placed: str, stored: str) -> list[Tensor]:
    model, cache = made(placed, stored)
    return [step(model, cache, index) for index in range(len(STEPS))]


# ---- Copies


def saved_and_loaded(cache: KVCache) -> KVCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[KVCache], KVCache]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": saved_and_loaded,
}


@every_cache
@every_point
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_goes_on_alone_and_so_does_the_original(
    placed: str, stored: str, at: int, how: str
) -> None:
    expected = untouched(placed, stored)
    model, cache = made(placed, stored)
    for index in range(at):
        step(model, cache, index)
    other = COPIES[how](cache)
    for one in (other, cache):
        for index in range(at, len(STEPS)):
            assert step(model, one, index).equal(expected[index])
    assert other.lengths == cache.lengths
    for layer in range(model.config.n_layers):  # what is listed is what is stored
        pairs = zip(other.entries(layer, 1), cache.entries(layer, 1), strict=True)
        assert all(a.equal(b) for a, b in pairs)
    before = snapshot(cache)
    other.fill_unused(float("nan"))
    other.reset()
    assert unchanged(cache, before)


@every_cache
def test_a_shallow_copy_is_refused(placed: str, stored: str) -> None:
    """It would share the storage and not the lengths."""
    _, cache = made(placed, stored)
    with pytest.raises(ValueError, match=r"use copy.deepcopy\(\)"):
        copy.copy(cache)


# ---- Modes of PyTorch


@every_cache
@pytest.mark.parametrize(
    "modes", [(False, True, False), (True, False, True), (True, True, False)], ids=str
)
def test_inference_mode_around_some_steps_and_not_others(
    placed: str, stored: str, modes: tuple[bool, bool, bool]
) -> None:
    """The first says where the cache is made, the others where even and odd steps are run."""
    expected = untouched(placed, stored)
    with torch.inference_mode(modes[0]):
        model, cache = made(placed, stored)
    for index in range(len(STEPS)):
        with torch.inference_mode(modes[1 + index % 2]):
            assert step(model, cache, index).equal(expected[index])
    cache.select([1, 0])
    cache.truncate([n - 1 for n in cache.lengths])


@every_cache
@every_point
def test_autocast_is_refused_and_changes_nothing(placed: str, stored: str, at: int) -> None:
    expected = untouched(placed, stored)
    model, cache = made(placed, stored)
    for index in range(len(STEPS)):
        if index == at:
            with (
                torch.autocast("cpu", torch.bfloat16),
                pytest.raises(ValueError, match="autocast is on"),
            ):
                step(model, cache, index)
        assert step(model, cache, index).equal(expected[index])


@every_cache
def test_gradients_are_refused_and_no_grad_is_exact(placed: str, stored: str) -> None:
    expected = untouched(placed, stored)
    model, cache = made(placed, stored)
    model = copy.deepcopy(model).requires_grad_()
    with pytest.raises(ValueError, match="ask for gradients"):
        step(model, cache, 0)
    cache.reset()
    with torch.no_grad():
        for index in range(len(STEPS)):
            assert step(model, cache, index).equal(expected[index])
    assert not any(tensor.requires_grad for tensor in cache.tensors)


@every_cache
def test_another_dtype_of_the_model_is_refused(placed: str, stored: str) -> None:
    model, cache = made(placed, stored)
    step(model, cache, 0)
    lengths = cache.lengths
    with pytest.raises(ValueError, match=r"dtype torch\.float64 instead of torch\.float32"):
        step(copy.deepcopy(model).float(), cache, 1)
    assert cache.lengths == lengths


# ---- A forward pass that does not come to its end


class Broken(Exception):
    """What a hook raises, and KeyboardInterrupt beside it."""


def interrupt(model: Transformer, layer: int, error: type[BaseException]) -> nn.Module:
    model = copy.deepcopy(model)

    def stop(module: nn.Module, args: object) -> None:
        raise error

    model.blocks[layer].attention.output.register_forward_pre_hook(stop)
    attention = model.blocks[layer].attention
    attention.attend = lambda *args: (_ for _ in ()).throw(error)
    return model


def goes_back(cache: KVCache, lengths: tuple[int, ...]) -> bool:
    """Whether the cache is as it was; otherwise it said why not, and is empty now."""
    try:
        cache.truncate(lengths)
    except ValueError as error:
        reason = str(error)
    else:
        return True
    assert "cannot go back" in reason  # a ring or a group of tokens that has let some go
    cache.reset()
    return False


@every_cache
@every_point
@pytest.mark.parametrize(("layer", "error"), [(0, Broken), (1, KeyboardInterrupt), (2, Broken)])
def test_an_interrupted_pass_is_undone_or_refused(
    placed: str, stored: str, at: int, layer: int, error: type[BaseException]
) -> None:
    expected = untouched(placed, stored)
    model, cache = made(placed, stored)
    for index in range(at):
        step(model, cache, index)
    before = cache.lengths
    with pytest.raises(error):
        step(interrupt(model, layer, error), cache, at)
    if layer < model.config.n_layers - 1:
        for use in (lambda: step(model, cache, at), lambda: cache.select([0, 1]),
                    lambda: cache.entries(2, 0)):
            with pytest.raises(UnfinishedStepError, match=r"truncate\(\) to .*reset\(\)"):
                use()
    for index in range(at if goes_back(cache, before) else 0, len(STEPS)):
        # A tail over a ring may have settled already: the same keys, summed in another order.
        torch.testing.assert_close(step(model, cache, index), expected[index], rtol=0, atol=1e-9)


@every_cache
@pytest.mark.parametrize("call", ["truncate", "select", "reset"])
def test_what_changes_rows_ends_the_step(placed: str, stored: str, call: str) -> None:
    """On a paged cache an update() after it would overwrite a block lent to someone else."""
    model, cache = made(placed, stored)
    cache.reserve([2, 1], 2)
    kinds = cache.layer_kinds
    new = [
        tuple(torch.ones(2, kind.kv_heads, 2, width, dtype=kind.dtype)
              for width in (kind.key_dim, kind.value_dim))
        for kind in kinds
    ]  # fmt: skip
    cache.update(0, *new[0])
    if call == "select":
        with pytest.raises(UnfinishedStepError):
            cache.select([1, 0])
        return
    cache.truncate([0, 0]) if call == "truncate" else cache.reset()
    assert cache.lengths == (0, 0)
    for layer in range(len(kinds)):
        with pytest.raises(ValueError, match="without reserve"):
            cache.update(layer, *new[layer])
    expected = untouched(placed, stored)
    for index in range(len(STEPS)):
        assert step(model, cache, index).equal(expected[index])


# ---- Two threads


@pytest.mark.parametrize(("placed", "stored"), CASES[:: len(CASES) // 8])
def test_a_second_thread_in_the_middle_of_a_step_is_refused(placed: str, stored: str) -> None:
    expected = untouched(placed, stored)
    model, cache = made(placed, stored)
    step(model, cache, 0)
    refused: list[BaseException] = []

    def other() -> None:
        try:
            step(model, cache, 1)
        except UnfinishedStepError as error:
            refused.append(error)

    def meanwhile(module: nn.Module, args: object) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    slow = copy.deepcopy(model)
    slow.blocks[1].register_forward_pre_hook(meanwhile)
    assert step(slow, cache, 1).equal(expected[1])
    assert len(refused) == 1
    assert step(model, cache, 2).equal(expected[2])
