"""The loss of each token, the text to measure it on, and a window put on a trained model."""

import math
from collections.abc import Callable
from copy import deepcopy
from itertools import count

import pytest
import torch
from oracles.toys import SMALL, reference_logits, text, toy
from torch import Tensor

from kvbook import CacheFullError, KVCache, sample_text, token_losses, with_window
from kvbook.model.transformer import Transformer

n = 20
TOKENS = torch.tensor(text(n))


def surprise(logits: Tensor, tokens: Tensor) -> Tensor:
    """log Σ exp(logit) - the logit of the token that came, row by row."""
    return torch.stack([
        row.exp().sum().log() - row[token] for row, token in zip(logits, tokens, strict=True)
    ])


EXPECTED = surprise(reference_logits(toy(), TOKENS.tolist())[:-1], TOKENS[1:])


@pytest.mark.parametrize("chunk", [1, 2, 7, 18, 19, 20, 128])
def test_entry_i_is_the_loss_of_token_i_plus_1(chunk: int) -> None:
    losses = token_losses(toy(), TOKENS, chunk=chunk)
    assert losses.shape == (n - 1,)
    assert (losses - EXPECTED).abs().max() < 1e-12


def test_a_model_that_knows_nothing_loses_the_logarithm_of_the_vocabulary() -> None:
    model = toy(seed=9, tied_embeddings=True)
    weight = model.embedding.weight.clone()
    try:
        model.embedding.weight.zero_()
        assert token_losses(model, TOKENS).tolist() == pytest.approx([math.log(29)] * 19)
    finally:
        model.embedding.weight.copy_(weight)  # toys are shared


def test_losses_are_float64_whatever_the_model() -> None:
    losses = token_losses(toy(torch.float32), TOKENS)
    assert losses.dtype == torch.float64
    assert (losses - EXPECTED).abs().max() < 1e-4


def test_a_cache_with_a_past_continues_it() -> None:
    cache = toy().new_cache(1, n)
    first = token_losses(toy(), TOKENS[:8], cache)
    assert cache.lengths == (7,)  # token 7 was predicted, not read
    rest = token_losses(toy(), TOKENS[7:], cache)
    assert (torch.cat([first, rest]) - EXPECTED).abs().max() < 1e-12


@pytest.mark.parametrize("chunk", [1, 3, 19])
def test_the_cache_decides_what_is_remembered(chunk: int) -> None:
    seen = with_window(toy(), 4, sinks=2)
    losses = token_losses(seen, TOKENS, seen.new_cache(1, n, rollback=1), chunk)
    expected = surprise(reference_logits(toy(window=4, sinks=2), TOKENS.tolist())[:-1], TOKENS[1:])
    assert (losses - expected).abs().max() < 1e-12
    assert (losses - EXPECTED).abs().max() > 1e-2  # the window is felt


Text = tuple[Tensor, KVCache | None, int]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda m: (TOKENS[:1], None, 8), "give at least 2"),
        (lambda m: (TOKENS[None], None, 8), r"shape \(n,\), got \(1, 20\)"),
        (lambda m: (TOKENS[0], None, 8), r"shape \(n,\), got \(\)"),
        (lambda m: (TOKENS.tolist(), None, 8), r"shape \(n,\), got \[\d+, "),
        (lambda m: (None, None, 8), r"shape \(n,\), got None"),
        (lambda m: (TOKENS, "mine", 8), "cache must be a KVCache, got 'mine'"),
        (lambda m: (TOKENS.float(), None, 8), "int64"),
        (lambda m: (TOKENS + 29, None, 8), "from 0 to 28"),
        (lambda m: (TOKENS, None, 0), "chunk must be a positive integer, got 0"),
        (lambda m: (TOKENS, None, True), "chunk must be a positive integer, got True"),
        (lambda m: (TOKENS, m.new_cache(2, n), 8), "2 active rows"),
    ],
)
def test_what_is_no_line_of_tokens_is_refused(
    given: Callable[[Transformer], Text], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        token_losses(toy(), *given(toy()))


def test_a_text_that_does_not_fit_changes_nothing() -> None:
    cache = toy().new_cache(1, 18)
    with pytest.raises(CacheFullError, match="19 tokens"):
        token_losses(toy(), TOKENS, cache, chunk=4)
    assert cache.lengths == (0,)


def test_nor_does_one_with_more_tokens_than_positions() -> None:
    cache = toy(max_positions=18).new_cache(1, n)
    with pytest.raises(CacheFullError, match="19 tokens, but the model has 18 positions"):
        token_losses(toy(max_positions=18), TOKENS, cache, chunk=4)
    assert cache.lengths == (0,)


# ---- What is computed in which dtype


def test_the_loss_is_computed_in_float64_from_logits_of_any_dtype() -> None:
    """In bfloat16 itself the losses of a text would be rounded to three digits."""
    model = toy(torch.bfloat16)
    logits = model(TOKENS[None, :-1])[0]
    losses = token_losses(model, TOKENS)
    assert (losses - surprise(logits.double(), TOKENS[1:])).abs().max() < 1e-12
    rounded = surprise(logits, TOKENS[1:]).double()
    assert (losses - rounded).abs().max() > 1e-3


# ---- A NaN is no loss


def spoiled(part: str, value: float, layer: int = 0) -> Transformer:
    """A copy of the toy with one number of a weight changed; the query rows come first."""
    model = deepcopy(toy())
    model.blocks[layer].get_parameter(part)[0, 0] = value
    return model


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", ["attention.qkv.weight", "mlp.down.weight"])
def test_a_nan_in_a_weight_is_noticed(part: str, layer: int) -> None:
    with pytest.raises(ValueError, match="NaN"):
        token_losses(spoiled(part, math.nan, layer), TOKENS)


def test_a_nan_that_fused_attention_hides_is_noticed() -> None:
    """pytorch/pytorch#141128: without the check the losses are finite, and wrong."""
    model = spoiled("attention.qkv.weight", math.nan, layer=1)
    assert model(TOKENS[None, :2]).isfinite().all(), "hidden from who looks at the logits only"
    with pytest.raises(ValueError, match=r"attention was given NaN in its queries of shape"):
        token_losses(model, TOKENS, chunk=2)


def test_infinite_logits_are_noticed() -> None:
    model = deepcopy(toy())
    model.head.weight[3] = math.inf
    with pytest.raises(ValueError, match="19 of 19 losses of tokens 1 to 19 are NaN"):
        token_losses(model, TOKENS)


def test_a_nan_in_the_past_is_noticed_and_the_past_stays() -> None:
    cache = toy().new_cache(1, n)
    token_losses(toy(), TOKENS[:8], cache)
    keys, _ = cache.entries(1)
    for tensor in cache.tensors:
        tensor[tensor == keys[0, 3, 2]] = math.nan
    with pytest.raises(ValueError, match="NaN in its keys"):
        token_losses(toy(), TOKENS[7:], cache)
    assert cache.lengths == (7,)


# ---- What fails midway


class Stopped(Exception):
    """Anything that a user's machine may throw."""


def failing_in_the_third_pass(model: Transformer) -> Transformer:
    """Layer 1 of a copy gives up after the third pass has written layer 0."""
    model, passes = deepcopy(model), count(1)

    def give_up(*_: object) -> None:
        if next(passes) == 3:
            raise Stopped

    model.blocks[1].register_forward_pre_hook(give_up)
    return model


def test_a_failure_midway_takes_the_cache_back() -> None:
    cache = toy().new_cache(1, n)
    token_losses(toy(), TOKENS[:4], cache)
    with pytest.raises(Stopped):
        token_losses(failing_in_the_third_pass(toy()), TOKENS[3:], cache, chunk=5)
    assert cache.lengths == (3,)
    rest = token_losses(toy(), TOKENS[3:], cache)
    assert (rest - EXPECTED[3:]).abs().max() < 1e-12


def test_a_failure_that_a_window_cannot_take_back_says_so() -> None:
    seen = with_window(toy(), 2)
    cache = seen.new_cache(1, n, rollback=1)
    token_losses(seen, TOKENS[:4], cache)
    with pytest.raises(Stopped) as caught:
        token_losses(failing_in_the_third_pass(seen), TOKENS[3:], cache, chunk=5)
    (note,) = caught.value.__notes__
    assert note.startswith("the cache could not be taken back to 3 tokens")
    assert note.endswith("reset() it, or make a new one")


# ---- A window on a model


@pytest.mark.parametrize(("window", "sinks"), [(3, 0), (3, 2), ((None, 5), 0), ((2, 5), 1)])
def test_a_window_is_put_on_the_same_weights(
    window: int | tuple[int | None, ...], sinks: int
) -> None:
    seen = with_window(toy(), window, sinks)
    expected = reference_logits(toy(window=window, sinks=sinks), TOKENS.tolist())
    assert (seen(TOKENS[None])[0] - expected).abs().max() < 1e-12
    assert seen.embedding.weight is toy().embedding.weight


def test_the_model_itself_keeps_its_window() -> None:
    model = toy(window=6)
    with_window(model, None)
    assert model.config.window == 6
    assert with_window(model, None).config.window is None


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        with_window(toy(), 0)
    with pytest.raises(ValueError, match="3 layers, but the model has 2"):
        with_window(toy(), (1, 2, 3))
    assert toy().config == SMALL


# ---- The text


def test_the_text_is_long_enough_and_plain() -> None:
    story = sample_text()
    assert 2_000 < len(story.split()) < 2_100
    assert story.isascii()
    assert story.startswith("The Clock at Harrow Ferry\n\nIn the year")
    assert story.endswith("about a horse.")


def test_what_it_says_first_returns_last() -> None:
    words = sample_text().split()
    start, end = " ".join(words[:400]), " ".join(words[-400:])
    for name in ("Ottilie Brandt", "Harrow Ferry", "green book", "horse"):
        assert name in start, name
        assert name in end, name
