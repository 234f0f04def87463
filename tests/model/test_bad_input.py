"""Wrong input: the message names what was given, what is allowed and the way out.

And nothing has changed: the same cache goes on as if the call had not been made.
"""

from collections.abc import Callable

import pytest
import torch
from oracles.toys import LATENT, batch, snapshot, text, toy, unchanged

from kvbook.cache import Contiguous, KVCache
from kvbook.errors import (
    CacheFullError,
    DownloadError,
    UnsupportedModelError,
    WeightFileError,
)
from kvbook.generate import generate_cached, generate_naive, stream_cached, stream_naive
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> Transformer:
    return toy(max_positions=16)


@pytest.fixture
def cache(model: Transformer) -> KVCache:
    """Two rows of three and five tokens, ten slots each."""
    cache = model.new_cache(2, 10)
    model(batch(2, 5), cache, counts=[3, 5])
    return cache


Call = Callable[[Transformer, KVCache], object]
LONG = torch.int64

BAD_FORWARD: dict[str, tuple[Call, list[str]]] = {
    "one dimension": (
        lambda m, c: m(torch.tensor([1, 2]), c),
        ["torch.int64 of shape (2,)", "(batch, tokens)", "torch.tensor([ids])"],
    ),
    "three dimensions": (
        lambda m, c: m(torch.zeros(2, 1, 1, dtype=LONG), c),
        ["shape (2, 1, 1)", "(batch, tokens)"],
    ),
    "float tokens": (
        lambda m, c: m(torch.zeros(2, 1), c), ["torch.float32", "int64"],
    ),
    "32-bit tokens": (
        lambda m, c: m(torch.zeros(2, 1, dtype=torch.int32), c), ["torch.int32", "int64"],
    ),
    "no tokens": (
        lambda m, c: m(torch.zeros(2, 0, dtype=LONG), c), ["non-empty", "shape (2, 0)"],
    ),
    "no rows": (
        lambda m, c: m(torch.zeros(0, 2, dtype=LONG), c), ["non-empty", "shape (0, 2)"],
    ),
    "a list": (
        lambda m, c: m([[1], [2]], c), ["int64 tensor", "got list", "torch.tensor([ids])"],
    ),
    "an id that is too large": (
        lambda m, c: m(torch.tensor([[1], [29]]), c), ["from 0 to 28", "got 29", "tokenizer"],
    ),
    "a negative id": (
        lambda m, c: m(torch.tensor([[-1], [2]]), c), ["from 0 to 28", "got -1"],
    ),
    "too many rows": (
        lambda m, c: m(batch(3, 1), c), ["3 rows", "2 active rows", "select()"],
    ),
    "too few rows": (
        lambda m, c: m(batch(1, 1), c), ["1 rows", "2 active rows", "make a cache"],
    ),
    "too many tokens": (
        lambda m, c: m(batch(2, 6), c), ["row 1", "11 tokens", "10 slots", "larger capacity"],
    ),
    "counts of another batch": (
        lambda m, c: m(batch(2, 2), c, counts=[1]), ["from 0 to 2", "2 rows", "got [1]"],
    ),
    "a count above T": (
        lambda m, c: m(batch(2, 2), c, counts=[1, 3]), ["from 0 to 2", "got [1, 3]"],
    ),
    "a negative count": (
        lambda m, c: m(batch(2, 2), c, counts=[-1, 2]), ["from 0 to 2", "got [-1, 2]"],
    ),
    "a fractional count": (
        lambda m, c: m(batch(2, 2), c, counts=[1.0, 2]),  # type: ignore[list-item]
        ["one integer", "got [1.0, 2]"],
    ),
    "reserving more than T": (
        lambda m, c: c.reserve([1, 3], 2), ["from 0 to 2", "got [1, 3]"],
    ),
    "reserving a negative count": (
        lambda m, c: c.reserve([-1, 0], 2), ["from 0 to 2", "got [-1, 0]"],
    ),
    "reserving for other rows": (
        lambda m, c: c.reserve([1], 1), ["1 rows", "2 active rows"],
    ),
}  # fmt: skip

BAD_GENERATION: dict[str, tuple[Call, list[str]]] = {
    "no prompt": (
        lambda m, c: generate_cached(m, [], 3, cache=c), ["at least one token", "lengths []"],
    ),
    "an empty prompt": (
        lambda m, c: generate_cached(m, [[1], []], 3, cache=c), ["lengths [1, 0]", "begin-of-text"],
    ),
    "one flat prompt": (
        lambda m, c: generate_cached(m, [1, 2], 3, cache=c),  # type: ignore[list-item]
        ["got [1, 2]", "one list per row", "[[1, 2, 3]]"],
    ),
    "fractional tokens": (
        lambda m, c: generate_cached(m, [[1.7], [2]], 3, cache=c),  # type: ignore[list-item]
        ["got [[1.7], [2]]", "integer token ids"],
    ),
    "text": (
        lambda m, c: generate_cached(m, ["ab", "cd"], 3, cache=c),  # type: ignore[list-item]
        ["got ['ab', 'cd']", "integer token ids"],
    ),
    "an id outside the vocabulary": (
        lambda m, c: generate_cached(m, [[1], [29]], 3, cache=c), ["from 0 to 28", "got 29"],
    ),
    "zero new tokens": (
        lambda m, c: generate_cached(m, [[1], [2]], 0, cache=c), ["positive integer", "got 0"],
    ),
    "fewer than zero": (
        lambda m, c: generate_cached(m, [[1], [2]], -4, cache=c), ["positive integer", "got -4"],
    ),
    "a fraction": (
        lambda m, c: generate_cached(m, [[1], [2]], 2.5, cache=c),  # type: ignore[arg-type]
        ["positive integer", "got 2.5"],
    ),
    "more prompts than rows": (
        lambda m, c: generate_cached(m, [[1]] * 3, 3, cache=c),
        ["3 prompts", "2 active rows", "select()"],
    ),
    "a long prompt": (
        lambda m, c: generate_cached(m, [[1], text(6)], 1, cache=c),
        ["row 1 would hold 11 tokens", "10 slots", "larger capacity"],
    ),
    "many new tokens": (
        lambda m, c: generate_cached(m, [[1], [2]], 6, cache=c),
        ["row 1 would hold 11 tokens", "10 slots", "larger capacity"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*BAD_FORWARD, *BAD_GENERATION])
def test_the_message_helps_and_nothing_has_changed(
    name: str, model: Transformer, cache: KVCache
) -> None:
    call, fragments = {**BAD_FORWARD, **BAD_GENERATION}[name]
    before = snapshot(cache)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked below)
        call(model, cache)
    for fragment in fragments:
        assert fragment in str(error.value)
    assert unchanged(cache, before)
    after = model(batch(2, 2), cache, counts=[2, 1])
    fresh = model.new_cache(2, 10)
    model(batch(2, 5), fresh, counts=[3, 5])
    assert after.equal(model(batch(2, 2), fresh, counts=[2, 1]))


WITHOUT_A_CACHE = [
    "one dimension", "three dimensions", "float tokens", "32-bit tokens", "no tokens", "no rows",
    "a list", "an id that is too large", "a negative id", "counts of another batch",
    "a count above T", "a negative count", "a fractional count",
]  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_A_CACHE)
def test_the_model_alone_says_the_same(name: str, model: Transformer) -> None:
    call, fragments = BAD_FORWARD[name]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call(model, None)  # type: ignore[arg-type]
    for fragment in fragments:
        assert fragment in str(error.value)


def test_a_cache_with_room_beyond_the_model_s_positions_stops_before_it_starts(
    model: Transformer,
) -> None:
    """Not in the middle of the text: 5 held, 1 asked and 11 new ones would reach 16."""
    cache = model.new_cache(1, 40)
    model(batch(1, 5), cache)
    before = snapshot(cache)
    with pytest.raises(CacheFullError, match=r"row 0 would reach 17 tokens.*16 positions.*fewer"):
        generate_cached(model, [[1]], 12, cache=cache)
    assert unchanged(cache, before)
    assert len(generate_cached(model, [[1]], 10, cache=cache)[0]) == 10


@pytest.mark.parametrize("stream", [stream_cached, stream_naive])
def test_a_stream_complains_when_it_is_made_not_when_it_is_read(
    stream: Callable[..., object], model: Transformer
) -> None:
    with pytest.raises(ValueError, match="got 29"):
        stream(model, [[29]], 3)
    with pytest.raises(ValueError, match="got 0"):
        stream(model, [[1]], 0)
    with pytest.raises(CacheFullError, match="17 positions, but the model has 16; shorten"):
        stream(model, [text(8)], 10)


def test_the_naive_loop_complains_alike(model: Transformer) -> None:
    with pytest.raises(ValueError, match=r"lengths \[1, 0\]"):
        generate_naive(model, [[1], []], 3)
    with pytest.raises(ValueError, match="from 0 to 28, got 29"):
        generate_naive(model, [[29]], 3)


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", True, None])
def test_a_placement_has_positive_whole_sizes(value: object) -> None:
    with pytest.raises(ValueError, match=f"rows must be a positive integer, got {value!r}"):
        Contiguous(value, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"capacity must be a positive integer, got {value!r}"):
        Contiguous(2, value)  # type: ignore[arg-type]


def test_every_error_of_the_package_is_a_value_error() -> None:
    for error in (CacheFullError, DownloadError, UnsupportedModelError, WeightFileError):
        assert issubclass(error, ValueError)


OTHER_MODELS = {
    "another dtype": toy(torch.float32),
    "fewer layers": toy(n_layers=1),
    "one KV head": toy(n_kv_heads=1),
    "wider heads": toy(head_dim=10),
    "another window": toy(window=3),
    "a window in one layer": toy(window=(3, None)),
    "a latent": toy(**LATENT),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_the_cache_of_another_model_is_refused_before_it_is_written(name: str) -> None:
    model = toy()
    cache = OTHER_MODELS[name].new_cache(1, 8)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="cache"):
        model(torch.tensor([[1, 2]]), cache)
    assert unchanged(cache, before)
