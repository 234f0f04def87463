"""Time to first token, time per output token, and tokens per second."""

from collections.abc import Callable, Iterator

import pytest
from oracles.fake_device import FakeDevice

from kvbook import BlockPool, PrefixCache, stream_cached, stream_with_prefix, toy_model
from kvbook.measure import Clock, GenerationTiming, measure_generation

both_clocks = pytest.mark.parametrize(
    "make_clock", [FakeDevice.host_clock, FakeDevice.event_clock]
)


def stream(device: FakeDevice, prefill: float, step: float, tokens: int) -> Iterator[int]:
    """Ordered at once, as an accelerator takes it: the host is never busy."""
    device.order(device=prefill)
    for token in range(tokens):
        if token:
            device.order(device=step)
        yield token


@both_clocks
def test_half_a_second_of_prefill_and_16_tokens_that_end_at_2_seconds(
    make_clock: Callable[[FakeDevice], Clock],
) -> None:
    device = FakeDevice()
    taken = measure_generation(
        lambda: stream(device, 0.5, 0.1, 16), [100], clock=make_clock(device)
    )
    assert taken.ttft == pytest.approx(0.5)
    assert taken.total == pytest.approx(2.0)
    assert taken.tpot == pytest.approx(0.1)  # 1.5 s over 15 tokens, not 2.0 s over 16
    assert taken.decode_tokens_per_second == pytest.approx(10.0)
    assert taken.prefill_tokens_per_second == pytest.approx(200.0)
    assert taken.gaps[0] == pytest.approx([0.1] * 15)


@both_clocks
def test_prefill_tokens_are_tokens_and_not_prompts(
    make_clock: Callable[[FakeDevice], Clock],
) -> None:
    """huggingface/text-generation-inference#849: 4 prompts of 1,000 tokens in 0.5 s."""
    device = FakeDevice()
    taken = measure_generation(
        lambda: stream(device, 0.5, 0.25, 3), [1000] * 4, clock=make_clock(device)
    )
    assert taken.prefill_tokens_per_second == 8000
    assert taken.decode_tokens_per_second == 16  # four rows, each a token in 0.25 s


def test_padding_is_no_token() -> None:
    taken = GenerationTiming((1000, 10), ((0.5, 0.75),), "made up")
    assert taken.prefill_tokens_per_second == 2020


def test_what_happens_before_the_first_step_counts_towards_the_first_token() -> None:
    device = FakeDevice()

    def start() -> Iterator[int]:
        device.order("allocate a cache", host=0.25)
        return stream(device, 0.5, 0.125, 2)

    taken = measure_generation(start, [8], clock=device.host_clock())
    assert (taken.ttft, taken.tpot) == (0.75, 0.125)


def test_the_first_run_is_a_warm_up() -> None:
    device = FakeDevice()
    prefill = iter([1000.0])
    taken = measure_generation(
        lambda: stream(device, next(prefill, 1.0), 0.5, 3), [8], clock=device.event_clock()
    )
    assert taken.token_seconds == ((1.0, 1.5, 2.0),) * 3


def test_the_median_is_taken_over_the_runs() -> None:
    runs = ((1.0, 2.0, 3.0), (1.5, 10.0, 19.5), (2.0, 2.5, 3.0))
    taken = GenerationTiming((8,), runs, "made up")
    assert taken.ttft == 1.5
    assert taken.tpot == 1.0  # of 1.0, 9.0 and 0.5
    assert taken.total == 3.0


def test_a_real_stream_is_timed_to_its_end() -> None:
    model = toy_model()
    prompts = [[1, 2, 3], [4, 5]]
    taken = measure_generation(
        lambda: stream_cached(model, prompts, 5), [3, 2], repetitions=2, device="cpu"
    )
    assert [len(times) for times in taken.token_seconds] == [5, 5]
    assert all(gap > 0 for gaps in taken.gaps for gap in gaps)
    assert taken.batch == 2


# ---- A prefix cache


def test_what_is_found_is_not_computed() -> None:
    """992 of 1,000 prompt tokens found, the first token after 10 ms: 800 tokens/s, not 100,000."""
    taken = GenerationTiming((1000,), ((0.01,),), "made up", found_tokens=(992,))
    assert taken.computed_tokens == (8,)
    assert taken.prefill_tokens_per_second == pytest.approx(800)


def test_without_a_prefix_cache_everything_is_computed() -> None:
    taken = GenerationTiming((1000, 24), ((0.5,), (0.25,)), "made up")
    assert taken.computed_tokens == (1024, 1024)


def test_the_rate_is_of_each_run_with_what_it_found() -> None:
    taken = GenerationTiming((100,), ((1.0,), (0.5,), (0.5,)), "made up", (0, 90, 60))
    assert taken.computed_tokens == (100, 10, 40)
    assert taken.prefill_tokens_per_second == 80  # of 100, 20 and 80


@pytest.mark.parametrize(("warmup", "found"), [(0, (0, 8, 8)), (1, (8, 8, 8))])
def test_a_stream_over_a_prefix_cache_reports_what_each_run_found(
    warmup: int, found: tuple[int, ...]
) -> None:
    """Blocks of 4, a prompt of 11: the first two blocks are found from the second run on."""
    model, pool = toy_model(), BlockPool(8, 4)
    cache, prefix = model.new_bound_cache(pool), PrefixCache(pool, "toy, seed 0")
    prompt = list(range(11))
    prefix.end(prefix.begin([60, 61]))  # somebody else's prompt, before
    taken = measure_generation(
        lambda: stream_with_prefix(model, prompt, 3, cache, prefix),
        [11], warmup=warmup, device="cpu", prefix=prefix,
    )  # fmt: skip
    assert taken.found_tokens == found
    assert taken.computed_tokens == tuple(11 - tokens for tokens in found)


@pytest.mark.parametrize(("lengths", "began"), [([12], 1), ([6, 5], 1), ([11], 2)])
def test_a_prefix_cache_that_began_something_else_is_refused(
    lengths: list[int], began: int
) -> None:
    prefix = PrefixCache(BlockPool(8, 4), "toy, seed 0")

    def start() -> Iterator[int]:
        for _ in range(began):
            prefix.end(prefix.begin(range(11)))
        return iter([1, 2])

    with pytest.raises(ValueError, match=rf"a run began {began} prompts of {11 * began} tokens"):
        measure_generation(start, lengths, clock=FakeDevice().host_clock(), prefix=prefix)


def test_one_token_has_a_first_but_no_rate() -> None:
    device = FakeDevice()
    taken = measure_generation(lambda: stream(device, 1.0, 1.0, 1), [8], clock=device.host_clock())
    assert taken.ttft == 1.0
    with pytest.raises(ValueError, match=r"at least two tokens in every run, got \[1, 1, 1\]"):
        _ = taken.tpot


@pytest.mark.parametrize(
    ("lengths", "how", "message"),
    [
        ([], {}, r"prompt_lengths must list the number of tokens of each prompt, got \[\]"),
        (5, {}, "prompt_lengths must list the number of tokens of each prompt, got 5"),
        (None, {}, "prompt_lengths must list the number of tokens of each prompt, got None"),
        ([3, 1.5], {}, "a prompt length must be a whole number at least 1, got 1.5"),
        ([3, 0], {}, "a prompt length must be at least 1, got 0"),
        ([3], {"warmup": -1}, "warmup must be from 0 to 1,000, got -1"),
        ([3], {"repetitions": 0}, "repetitions must be from 1 to 1,000, got 0"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(
    lengths: list[int], how: dict[str, int], message: str
) -> None:
    device = FakeDevice()
    with pytest.raises(ValueError, match=message):
        measure_generation(
            lambda: stream(device, 1, 1, 2), lengths, clock=device.host_clock(), **how
        )
    assert device.log == []


def test_a_stream_without_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="the stream yielded no token"):
        measure_generation(lambda: iter(()), [3], clock=FakeDevice().host_clock())
