"""What a timer must and must not count. All times are a fake device's, so they are exact."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from oracles.fake_device import FakeDevice

from kvbook.accounting import Hardware
from kvbook.measure import TooFastError, compare, count_bytes, flush_cache, measure, timing
from kvbook.measure.clock import Clock, EventClock, HostClock, clock_for

MakeClock = Callable[[FakeDevice], Clock]
CLOCKS = [FakeDevice.host_clock, FakeDevice.event_clock]
both_clocks = pytest.mark.parametrize("make_clock", CLOCKS)

MIB = 1024**2
SLOW = Hardware("slow", {"float32": 1e12}, bandwidth=20e9, memory=None, source="made up")


@pytest.fixture(autouse=True)
def _cache_of_32_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "last_level_cache", lambda device: 32 * MIB)


# ---- The clock waits for the device


@both_clocks
def test_100_ms_of_work_ordered_in_1_ms_take_100_ms(make_clock: MakeClock) -> None:
    """TristanBilot/mlx-benchmark#21, pytorch/pytorch#177765: the clock read before the queue
    was empty."""
    device = FakeDevice()
    taken = measure(lambda: device.order(host=0.001, device=0.1), clock=make_clock(device))
    assert taken.median >= 0.1
    assert taken.median == pytest.approx(0.1, abs=0.0011)


def test_a_clock_that_does_not_wait_would_show_1_ms() -> None:
    device = FakeDevice()
    impatient = HostClock(now=device.now)
    taken = measure(lambda: device.order(host=0.001, device=0.1), clock=impatient)
    assert taken.median == pytest.approx(0.001)


def test_the_host_clock_waits_once_inside_a_region_whatever_runs_in_it() -> None:
    device = FakeDevice()

    def many() -> None:
        for _ in range(3):
            device.order(device=0.01)

    measure(many, warmup=0, repetitions=1, least_seconds=0, clock=device.host_clock())
    # The first wait drains what came before; the region is from the first reading to the second.
    assert device.log == ["wait", "read clock", "work", "work", "work", "wait", "read clock"]


def test_events_wait_once_per_region_and_after_it() -> None:
    device = FakeDevice()
    measure(
        lambda: device.order(device=0.01),
        warmup=0, repetitions=2, least_seconds=0, clock=device.event_clock(),
    )  # fmt: skip
    assert device.log == ["record", "work", "record", "wait"] * 2


@both_clocks
def test_work_left_over_in_the_queue_is_not_counted(make_clock: MakeClock) -> None:
    device = FakeDevice()
    device.order(device=50.0)
    taken = measure(lambda: device.order(device=0.5), warmup=0, clock=make_clock(device))
    assert taken.seconds == pytest.approx([0.5] * 15)


def pretend(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    """Let every device be there, and be run by ``module``."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr("kvbook.measure.clock.usable_device", torch.device)


def test_a_cpu_needs_no_waiting_and_an_accelerator_gets_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert clock_for("cpu") == HostClock()
    asked = []
    module = SimpleNamespace(Event=lambda **how: asked.append(how))
    pretend(monkeypatch, module)
    clock = clock_for("cuda")
    assert isinstance(clock, EventClock)
    clock.new_event()
    assert asked == [{"enable_timing": True}]


def test_an_accelerator_without_events_is_drained_before_the_host_clock_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice()
    module = SimpleNamespace(synchronize=device.wait)
    pretend(monkeypatch, module)
    clock = clock_for("mtia")
    assert clock.name == "host clock"
    clock.mark()
    assert device.waits == 1


def test_on_a_real_clock_a_nap_of_20_ms_takes_at_least_20_ms() -> None:
    taken = measure(lambda: time.sleep(0.02), warmup=0, repetitions=2, device="cpu")
    assert taken.best >= 0.02
    assert taken.clock == "host clock"


# ---- What lies outside the region


@both_clocks
def test_a_flush_adds_nothing_to_the_time(make_clock: MakeClock) -> None:
    """flashinfer-ai/flashinfer#1917, NVIDIA/TileGym#118: the flush itself was timed."""

    def run(flush_seconds: float) -> tuple[float, ...]:
        device = FakeDevice()
        return measure(
            lambda: device.order(device=0.25),
            before=lambda: device.order("flush", device=flush_seconds),
            clock=make_clock(device),
        ).seconds

    assert run(5.0) == run(0.0) == (0.25,) * 15


@both_clocks
def test_the_flush_comes_before_every_call(make_clock: MakeClock) -> None:
    device = FakeDevice()
    measure(
        lambda: device.order(device=0.25),
        before=lambda: device.order("flush"),
        warmup=1, repetitions=2, clock=make_clock(device),
    )  # fmt: skip
    assert [entry for entry in device.log if entry in ("flush", "work")] == ["flush", "work"] * 3


def test_a_flush_writes_four_times_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "last_level_cache", lambda device: 1000)
    count = count_bytes(flush_cache("cpu"))
    assert (count.read(), count.written()) == (0, 4000)


def test_a_flush_of_an_unknown_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "last_level_cache", lambda device: None)
    with pytest.raises(ValueError, match=r"does not say how large .* cpu is; use a working set"):
        flush_cache("cpu")


# ---- Warm-up, repetitions, order


def slow_first(device: FakeDevice, first: float, then: float) -> Callable[[], None]:
    costs: Iterator[float] = iter([first])
    return lambda: device.order(device=next(costs, then))


@both_clocks
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_first_call_1000_times_slower_does_not_move_the_median(
    make_clock: MakeClock, warmup: int
) -> None:
    """ROCm/rocm-libraries#5089: [1000, 1, 1, 1, …] has the median 1."""
    device = FakeDevice()
    taken = measure(slow_first(device, 1000, 1), warmup=warmup, clock=make_clock(device))
    assert taken.median == 1
    assert max(taken.seconds) == (1000 if warmup == 0 else 1)


@both_clocks
def test_whoever_comes_first_on_a_cold_device_gets_the_same_numbers(make_clock: MakeClock) -> None:
    """Genesis-Embodied-AI/genesis-world#2722: the order of two objects decided the winner."""

    def run(order: list[str]) -> dict[str, tuple[float, ...]]:
        device = FakeDevice()
        cold: Iterator[float] = iter([1000.0])  # the first work on this device, whoever orders it
        fns = {
            name: lambda cost=cost: device.order(device=next(cold, cost))
            for name, cost in {"a": 1.0, "b": 2.0}.items()
        }
        together = compare({name: fns[name] for name in order}, clock=make_clock(device))
        return {name: together[name].seconds for name in "ab"}

    assert run(["a", "b"]) == run(["b", "a"]) == {"a": (1.0,) * 15, "b": (2.0,) * 15}


def test_functions_that_are_compared_take_turns_and_swap_places() -> None:
    device = FakeDevice()
    compare(
        {name: lambda name=name: device.order(name, device=1.0) for name in "abc"},
        warmup=1, repetitions=3, clock=device.event_clock(),
    )  # fmt: skip
    calls = [entry for entry in device.log if entry in "abc"]
    assert calls == [*"abc", *"abc", *"cba", *"abc"]


def test_short_functions_are_repeated_until_there_is_enough_to_count() -> None:
    device = FakeDevice()
    tick = 2.0**-10  # about a millisecond, exact in binary

    def repetitions(least_seconds: float) -> int:
        return len(
            measure(
                lambda: device.order(device=tick),
                least_seconds=least_seconds, clock=device.event_clock(),
            ).seconds
        )  # fmt: skip

    assert repetitions(0) == 15
    assert repetitions(64 * tick) == 64
    assert repetitions(1e9) == 1000


# ---- Median and spread


def test_median_quartiles_and_spread() -> None:
    taken = timing.Timing((5.0, 1.0, 3.0, 2.0, 4.0), "host clock")
    assert taken.median == 3
    assert taken.best == 1
    assert taken.quartiles == (2, 4)
    assert taken.spread == pytest.approx(2 / 3)
    assert taken.rate(6) == 2


def test_one_slow_repetition_of_nine_moves_the_median_not_at_all() -> None:
    """Skewed, as times are: the mean would be 12, and the middle of best and worst 50."""
    taken = timing.Timing((1.0,) * 5 + (2.0, 2.0, 2.0, 99.0), "host clock")
    assert taken.median == 1
    assert taken.rate(6) == 6
    assert taken.quartiles == (1, 2)


def test_a_working_set_that_fills_the_cache_exactly_fits() -> None:
    assert timing.Timing((1.0,), "x", working_set=100, last_level_cache=100).fits_in_cache is True
    assert timing.Timing((1.0,), "x", working_set=101, last_level_cache=100).fits_in_cache is False


def test_a_time_at_exactly_the_bound_is_possible() -> None:
    least = SLOW.bound(0, 20_000_000_000, "float32")  # 1 s
    assert timed(1.0, bound=least).median == 1.0
    assert timed(0.75, bound=least, tolerance=0.25).median == 0.75
    with pytest.raises(TooFastError):
        timed(0.75 - 2**-20, bound=least, tolerance=0.25)


def test_one_repetition_has_no_spread() -> None:
    assert timing.Timing((5.0,), "host clock").quartiles == (5, 5)
    assert timing.Timing((5.0,), "host clock").spread == 0


# ---- Too good to be true


def timed(seconds: float, **how: object) -> timing.Timing:
    device = FakeDevice()
    return measure(
        lambda: device.order(device=seconds), clock=device.event_clock(), **how  # type: ignore
    )


def test_a_time_below_the_stated_peak_is_refused() -> None:
    """vllm-project/vllm#36592, TileOPs#1725: more bytes per second than the memory has."""
    least = SLOW.bound(0, 1_000_000_000, "float32")  # 1 GB at 20 GB/s: 50 ms
    with pytest.raises(
        TooFastError,
        match=r"measured 10 ms, but memory alone takes at least 50 ms at the stated peak; working "
        r"set 16 MiB, 0\.50 times the last-level cache of 32 MiB\. Check the stated",
    ):
        timed(0.010, bound=least, working_set=16 * MIB)
    assert timed(0.0625, bound=least).median == 0.0625


def test_too_many_operations_are_refused_as_well() -> None:
    least = SLOW.bound(2 * 10**12, 0, "float32")
    with pytest.raises(TooFastError, match="measured 1 s, but compute alone takes at least 2 s"):
        timed(1.0, bound=least)


def test_a_measured_peak_may_be_given_room_for_noise() -> None:
    least = SLOW.bound(0, 20_000_000_000, "float32")  # 1 s
    assert timed(0.9375, bound=least, tolerance=0.1).median == 0.9375
    with pytest.raises(TooFastError):
        timed(0.875, bound=least, tolerance=0.1)


def test_the_median_is_held_against_the_bound_and_not_the_best() -> None:
    """Three repetitions of 0.5, 1 and 2 s: one that a cache served is no reason to refuse."""
    least = SLOW.bound(0, 20_000_000_000, "float32")  # 1 s
    device, left = FakeDevice(), [1.0, 0.5, 2.0]
    taken = measure(
        lambda: device.order(device=left.pop(0)), clock=device.event_clock(), bound=least,
        warmup=0, repetitions=3, least_seconds=0,
    )  # fmt: skip
    assert (taken.best, taken.median) == (0.5, 1.0)


def test_the_working_set_is_stated_beside_the_last_level_cache() -> None:
    inside, outside = timed(1.0, working_set=16 * MIB), timed(1.0, working_set=64 * MIB)
    assert (inside.fits_in_cache, outside.fits_in_cache) == (True, False)
    assert outside.describe() == (
        "1 s (quartiles 1 s to 1 s, 15 repetitions, device events); working set 64 MiB, 2.00 "
        "times the last-level cache of 32 MiB"
    )


def test_what_is_not_known_is_said() -> None:
    assert timed(1.0).fits_in_cache is None
    assert timed(1.0).describe().endswith("working set not stated, last-level cache of 32 MiB")
    assert timing.describe_working_set(2048, None) == (
        "working set 2 KiB, last-level cache of unknown size"
    )


# ---- Bad input


def test_work_that_is_too_short_for_the_clock_is_refused() -> None:
    with pytest.raises(ValueError, match=r"took 0\.0 s by the device events, too short"):
        timed(0.0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"warmup": -1}, "warmup must be from 0 to 1,000, got -1"),
        ({"repetitions": 0}, "repetitions must be from 1 to 1,000, got 0"),
        ({"repetitions": 1.5}, "repetitions must be a whole number from 1 to 1,000, got 1.5"),
        ({"least_seconds": -1}, "least_seconds must be a number from 0 to inf, got -1"),
        ({"working_set": 0}, "working_set must be at least 1, got 0"),
        ({"tolerance": 1.0}, "tolerance must be below 1, got 1.0"),
        ({"tolerance": float("nan")}, "tolerance must be a number from 0 to 1, got nan"),
        ({"tolerance": -1e-9}, "tolerance must be a number from 0 to 1, got -1e-09"),
        ({"least_seconds": float("nan")}, "least_seconds must be a number from 0 to inf, got nan"),
        ({"warmup": 10**30}, "warmup must be from 0 to 1,000, got a number of 100 bits"),
        ({"before": 1}, "before must be a function, got 1"),
        ({"bound": 1}, "bound must be a Bound, got 1"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(
    how: dict[str, object], message: str
) -> None:
    device = FakeDevice()
    with pytest.raises(ValueError, match=message):
        measure(device.order, clock=device.event_clock(), **how)  # type: ignore[arg-type]
    assert device.log == []


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="no functions"):
        compare({})
