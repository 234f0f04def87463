"""One forward pass of a model, timed at a given length: a point for the roofline.

Knows: how to bring a cache to a length without computing it, what the formulas say the pass
takes. Does not know: peaks, figures.
"""

from dataclasses import dataclass

import torch

from kvbook.accounting.flops import step_flops
from kvbook.accounting.traffic import step_traffic
from kvbook.accounting.units import check_count, shown
from kvbook.cache.cache import KVCache
from kvbook.errors import CacheFullError
from kvbook.measure.clock import Clock, check_clock
from kvbook.measure.timing import MOST_REPETITIONS, measure
from kvbook.model.arguments import check_is
from kvbook.model.transformer import Transformer

MOST_ROWS = 1 << 16


@dataclass(frozen=True)
class StepTiming:
    """``batch`` rows of T new tokens after S past ones: prefill is S = 0, decode is T = 1.

    ``flops`` and ``moved_bytes`` are the formulas' (``step_flops``, ``step_traffic``): the
    operations that are needed and the least bytes. ``seconds`` is the median.
    """

    T: int
    S: int
    batch: int
    dtype: str
    flops: int
    moved_bytes: int
    seconds: float
    quartiles: tuple[float, float]

    @property
    def label(self) -> str:
        """What was timed, in words: ``decode after 512, batch 8``."""
        if self.T == 1 and self.S:
            words = f"decode after {self.S:,}"
        else:
            words = f"prefill of {self.T:,}" + (f" after {self.S:,}" if self.S else "")
        return words if self.batch == 1 else f"{words}, batch {self.batch}"

    @property
    def intensity(self) -> float:
        """Operations per byte: where the point stands on the roofline's horizontal axis."""
        return self.flops / self.moved_bytes

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.moved_bytes / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows."""
        return self.batch * self.T / self.seconds


@torch.inference_mode()
def measure_step(
    model: Transformer,
    T: int,
    S: int,
    batch: int = 1,
    *,
    repetitions: int = 7,
    clock: Clock | None = None,
) -> StepTiming:
    """Time one pass that asks for the last logits only. The cache is taken back in between.

    The S past tokens are random keys and values, the weights are the model's: neither changes
    the time. Raises ``ValueError`` for a count that is not positive (S may be 0) and
    ``CacheFullError`` where the model has too few positions.
    """
    check_is("model", model, Transformer)
    check_count("T", T)
    check_count("S", S, 0)
    check_count("batch", batch, 1, MOST_ROWS)
    _check_positions(model, S + T)
    check_count("repetitions", repetitions, 1, MOST_REPETITIONS)
    if clock is not None:
        check_clock(clock)
    dtype = str(model.dtype).removeprefix("torch.")
    flops = step_flops(model.config, T, S, batch, logits=1).total
    traffic = step_traffic(model.config, T, S, batch, dtype, dtype)
    cache = filled_cache(model, batch, S, S + T)
    # A generator of its own: the random numbers of the caller stay as they are.
    generator = torch.Generator(model.device).manual_seed(0)
    tokens = torch.randint(
        0, model.config.vocab_size, (batch, T), device=model.device, generator=generator
    )
    timing = measure(
        lambda: model(tokens, cache, last_only=True),
        before=lambda: cache.truncate(S),
        repetitions=repetitions,
        device=model.device,
        clock=clock,
        working_set=traffic.total,
    )
    return StepTiming(
        T, S, batch, dtype, flops, traffic.total, timing.median, timing.quartiles
    )


def _check_positions(model: Transformer, end: int) -> None:
    if end > model.config.max_positions:
        raise CacheFullError(
            f"row 0 would reach {shown(end)} tokens, but the model has "
            f"{model.config.max_positions} positions; time a shorter text"
        )


def filled_cache(model: Transformer, batch: int, length: int, capacity: int) -> KVCache:
    """A cache whose rows hold ``length`` random keys and values each. Nothing is computed.

    Layers with a window keep no more than they see, beside room for the tokens still to come.
    Raises ``ValueError`` for a count that is out of range and ``CacheFullError`` where the model
    has too few positions.
    """
    check_is("model", model, Transformer)
    check_count("batch", batch, 1, MOST_ROWS)
    check_count("capacity", capacity)
    _check_positions(model, capacity)
    check_count("length", length, 0, capacity)
    cache = model.new_cache(batch, capacity, rollback=max(1, capacity - length))
    if length == 0:
        return cache
    config = model.config
    widths = config.cached_key_dim, config.cached_value_dim
    generator = torch.Generator(model.device).manual_seed(0)
    cache.reserve([length] * batch, length)
    for layer in range(config.n_layers):
        keys, values = (
            torch.randn(
                batch, config.cached_heads, length, width, device=model.device, generator=generator
            )
            for width in widths
        )
        cache.update(layer, keys.to(model.dtype), values.to(model.dtype))
    return cache
