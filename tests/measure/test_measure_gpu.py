"""The same instruments where there is a CUDA device: ``pytest -m gpu``."""

import time

import pytest
import torch

from kvbook.accounting import step_flops, step_traffic
from kvbook.measure import (
    EventClock,
    HostClock,
    clock_for,
    count_bytes,
    count_flops,
    count_traffic,
    flush_cache,
    last_level_cache,
    measure,
    measure_step,
    model_groups,
    probe,
)
from kvbook.model.toy import toy_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_events_and_a_drained_host_clock_agree_and_an_undrained_one_does_not() -> None:
    a = torch.randn(8192, 8192, device="cuda")

    def work() -> None:
        for _ in range(4):
            a @ a

    events = measure(work, clock=clock_for("cuda"))
    drained = measure(work, clock=HostClock(torch.cuda.synchronize))
    assert isinstance(clock_for("cuda"), EventClock)
    assert events.median == pytest.approx(drained.median, rel=0.2)
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    ordered = time.perf_counter() - start
    torch.cuda.synchronize()
    assert ordered < 0.5 * events.median


def test_a_small_buffer_is_faster_than_memory_unless_the_cache_is_flushed() -> None:
    small = torch.ones((last_level_cache("cuda") or 0) // 16, device="cuda")
    kept = measure(lambda: small.mul_(1.0), device="cuda")
    flushed = measure(lambda: small.mul_(1.0), before=flush_cache("cuda"), device="cuda")
    assert kept.best < flushed.best


def test_the_probe_finds_rates_that_a_step_does_not_exceed() -> None:
    found = probe("cuda", ["float32", "bfloat16"])
    assert found.bandwidth > 1e11
    assert found.peak_flops["bfloat16"] > 1e12
    assert found.provenance["clock"] == "device events"
    step = measure_step(toy_model(dtype=torch.bfloat16).to("cuda"), 1, 128, 4)
    assert step.flops_per_second < found.peak_flops["bfloat16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counters_meet_the_formulas_on_the_device(dtype: str) -> None:
    model = toy_model(dtype=getattr(torch, dtype)).to("cuda")
    cache = model.new_cache(2, 16)
    inputs = torch.randint(0, 64, (2, 5), device="cuda")
    model(inputs, cache)
    new = inputs[:, :1]
    flops = count_flops(lambda: model(new, cache))
    cache.truncate(5)
    traffic = count_traffic(count_bytes(lambda: model(new, cache), model_groups(model, cache)))
    formula = step_flops(model.config, 1, 5, 2)
    assert (flops.projections, flops.mlp, flops.head) == (
        formula.projections, formula.mlp, formula.head
    )  # fmt: skip
    assert flops.attention == formula.attention  # one query: no pair is masked
    assert traffic.weights == step_traffic(model.config, 1, 5, 2, dtype, dtype).weights
