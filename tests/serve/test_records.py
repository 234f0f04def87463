"""What is measured: times of requests, tokens and blocks of steps, and the picture of both."""

from itertools import pairwise
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from oracles.serving import alone, engine, requests, texts
from oracles.toys import text, toy

from kvbook.cache import BlockPool, PrefixCache
from kvbook.generate import Sampler
from kvbook.serve import (
    Arrival,
    LogicalClock,
    Mix,
    Ran,
    Request,
    RequestRecord,
    Scheduler,
    StepRecord,
    WallClock,
    make_trace,
    replay,
    serve_static,
    simulate,
)
from kvbook.serve.timeline import runs_of, timeline

pytestmark = pytest.mark.usefixtures("one_thread")
mpl.use("agg")

SMALL = Mix(prompt=(3, 9), new=(2, 9), beginning=8, vocab_size=29)


# ---- One request, followed by hand


def test_the_times_of_a_request() -> None:
    """A unit for each pass. The first runs alone, the second comes at 2 and waits for blocks."""
    server = engine(blocks=4, token_budget=4)
    trace = [
        Arrival(0.0, Request(text(10, seed=1), 4)),  # three passes for the prompt, then three
        Arrival(1.5, Request(text(9, seed=2), 1)),  # three more passes
    ]
    replay(server, trace)
    first, second = server.requests
    assert (first.arrival, first.started, first.first_token, first.last_token, first.ended) == (
        0.0, 0.0, 3.0, 6.0, 6.0,
    )  # fmt: skip
    assert (first.queue_time, first.ttft, first.tpot) == (0.0, 3.0, 1.0)
    # It is taken at 2.0, when the step that ran at 1.5 is over.
    assert (second.arrival, second.started, second.first_token, second.ended) == (
        2.0, 6.0, 9.0, 9.0,
    )  # fmt: skip
    assert (second.queue_time, second.ttft, second.tpot) == (4.0, 7.0, None)
    assert (first.computed_tokens, second.computed_tokens) == (13, 9)


def test_the_blocks_and_tokens_of_a_step() -> None:
    server = engine(blocks=8, token_budget=12)
    for length in (9, 5):
        server.add(Request(text(length, seed=length), 3))
    server.step()
    first = server.steps[0]
    assert (first.number, first.start, first.end, first.forwards) == (0, 0.0, 2.0, 2)
    assert first.ran == (Ran(0, "prefill", 9), Ran(1, "prefill", 3))
    assert (first.prefilled, first.decoded, first.drawn) == (12, 0, 1)
    # Nine and five tokens lie in three and two blocks of four.
    assert (first.blocks_used, first.blocks_free, first.blocks_evictable) == (5, 3, 0)
    assert (first.slots_used, first.slots_empty, first.fragmentation) == (20, 6, 6 / 20)
    server.step()
    second = server.steps[1]
    assert second.ran == (Ran(0, "decode", 1), Ran(1, "prefill", 2))
    assert (second.prefilled, second.decoded, second.drawn) == (2, 1, 2)
    assert (second.slots_empty, second.running, second.waiting) == (5, 2, 0)
    list(server.run())
    server.add(Request(text(9, seed=9), 1))
    server.step()
    # Nine tokens and two drawn were written, five and two as well: three full blocks are left.
    assert (server.steps[-1].blocks_used, server.steps[-1].blocks_evictable) == (3, 1)
    assert server.steps[-1].ran == (Ran(3 - 1, "prefill", 1),)


def test_tokens_add_up() -> None:
    """What ran in the steps is what the requests had computed; what was drawn was handed out."""
    server = engine(blocks=10, token_budget=7)
    for request in requests(30, seed=1, drafts=2):
        server.add(request)
    outputs = list(server.run())
    ran = sum(one.tokens for step in server.steps for one in step.ran)
    assert ran == sum(record.computed_tokens for record in server.requests)
    assert sum(step.drawn for step in server.steps) == sum(len(o.tokens) for o in outputs)
    assert sum(record.new_tokens for record in server.requests) == sum(
        len(output.tokens) for output in outputs
    )
    again = {one.id for step in server.steps for one in step.ran if one.phase == "recompute"}
    gave_way = {id for step in server.steps for id in step.preempted}
    assert again == gave_way == {r.id for r in server.requests if r.preemptions}
    assert gave_way
    for step in server.steps:
        assert step.prefilled + step.decoded <= 7
        assert step.blocks_used + step.blocks_free + step.blocks_evictable == 10
    assert [step.number for step in server.steps] == list(range(len(server.steps)))


def test_only_so_many_records_are_kept() -> None:
    server = engine(history=3)
    for number in range(5):
        server.add(Request(text(4, seed=number), 2))
    list(server.run())
    assert [record.id for record in server.requests] == [2, 3, 4]
    assert len(server.steps) == 3


# ---- Traces


def test_a_trace_is_as_it_was_asked_for() -> None:
    mix = Mix(prompt=(3, 9), new=(2, 5), shared=0.5, beginnings=2, beginning=8, vocab_size=29)
    trace = make_trace(2000, rate=4.0, mix=mix)
    assert trace == make_trace(2000, rate=4.0, mix=mix)
    assert trace != make_trace(2000, rate=4.0, mix=mix, seed=1)
    gaps = [b.time - a.time for a, b in pairwise(trace)]
    mean = sum(gaps) / len(gaps)
    assert 0.23 < mean < 0.27  # a quarter, and a standard error of 0.0056
    # Of exponential gaps, 1 - 1/e are below the mean; of equal gaps, all or none.
    assert 0.59 < sum(gap < mean for gap in gaps) / len(gaps) < 0.68
    prompts = [one.request.prompt for one in trace]
    with_beginning = [prompt for prompt in prompts if len(prompt) > 9]
    assert 0.46 < len(with_beginning) / 2000 < 0.54
    assert len({prompt[:8] for prompt in with_beginning}) == 2
    lengths = {len(prompt) for prompt in prompts}
    assert lengths == {*range(3, 10), *range(11, 18)}
    assert {one.request.max_new_tokens for one in trace} == {2, 3, 4, 5}
    assert {token for prompt in prompts for token in prompt} == set(range(29))
    assert len({one.request.seed for one in trace}) == 2000


def test_a_replay_gives_what_each_request_gets_alone() -> None:
    trace = make_trace(20, 0.5, Mix((3, 9), (2, 9), 0.5, 2, 8, 29, Sampler(1.0)))
    server = engine(blocks=8)
    assert replay(server, trace) == [alone(one.request) for one in trace]
    # A second one begins where the clock stands now.
    now = server.clock.now()
    replay(server, trace[:3])
    assert [record.id for record in server.requests][-3:] == [20, 21, 22]
    assert min(record.arrival for record in list(server.requests)[-3:]) >= now + trace[0].time


def test_an_engine_that_has_nothing_to_do_waits_for_the_next_arrival() -> None:
    server = engine()
    replay(server, [Arrival(5.0, Request(text(3), 1)), Arrival(50.0, Request(text(3), 1))])
    assert [(r.arrival, r.ended) for r in server.requests] == [(5.0, 6.0), (50.0, 51.0)]


def test_the_clock_on_the_wall_waits() -> None:
    clock = WallClock()
    start = clock.now()
    clock.wait_until(start + 0.02)
    clock.forward(1000)
    assert clock.now() - start >= 0.02
    clock.wait_until(0.0)  # is over already


def test_a_simulation_plans_what_the_engine_plans() -> None:
    """Lengths do not depend on which token was drawn, so neither do steps."""
    trace = make_trace(40, 0.5, SMALL)
    clock = LogicalClock(per_forward=0.0)
    alone_ = Scheduler(PrefixCache(BlockPool(8, 4), "toy"), clock, token_budget=6, max_rows=4)
    # All are there from the start, for the two clocks count passes differently.
    crowd = [Arrival(0.0, one.request) for one in trace]
    records = list(simulate(alone_, crowd))
    again = engine(blocks=8, token_budget=6)
    replay(again, crowd)
    assert sum(record.preemptions for record in records) > 0
    fields = ("id", "cached_tokens", "new_tokens", "preemptions", "reason")
    for mine, its in zip(records, again.requests, strict=True):
        assert [getattr(mine, name) for name in fields] == [getattr(its, name) for name in fields]


# ---- Static batching


def test_static_batches_give_each_request_what_it_gets_alone() -> None:
    trace = make_trace(13, 0.5, Mix((3, 9), (2, 9), 0.5, 2, 8, 29, Sampler(1.0)))
    stops = [one.request.prompt[:3] for one in trace]
    trace = [
        Arrival(one.time, Request(one.request.prompt, one.request.max_new_tokens,
                                  one.request.sampler, one.request.seed, stop_tokens=stop))
        for one, stop in zip(trace, stops, strict=True)
    ]  # fmt: skip
    served = serve_static(toy(), trace, rows=4, clock=LogicalClock())
    assert served.texts == [alone(one.request) for one in trace]
    assert {record.reason for record in served.requests} == {"length", "stop"}
    for record in served.requests:
        assert record.new_tokens == len(served.texts[record.id])


def test_a_static_batch_starts_together_and_ends_with_its_last_row() -> None:
    """Padding is computed: three prompts of up to 8 tokens cost 24, three rows cost 3 a step."""
    lengths, new = (8, 3, 5, 4), (2, 5, 3, 1)
    trace = [
        Arrival(0.0, Request(text(n, seed=n), k)) for n, k in zip(lengths, new, strict=True)
    ]
    served = serve_static(toy(), trace, rows=3, clock=LogicalClock(1.0, 0.25))
    first, second, third, last = sorted(served.requests, key=lambda record: record.id)
    assert [r.started for r in (first, second, third)] == [0.0, 0.0, 0.0]
    assert [r.first_token for r in (first, second, third)] == [7.0, 7.0, 7.0]  # 1 + 24 / 4
    step = 1.0 + 3 / 4
    assert [r.ended for r in (first, second, third)] == [7 + step, 7 + 4 * step, 7 + 2 * step]
    assert (last.started, last.queue_time) == (7 + 4 * step, 7 + 4 * step)
    assert [len(s.ran) for s in served.steps] == [3, 3, 2, 1, 1, 1]
    assert [s.waiting for s in served.steps] == [1, 1, 1, 1, 1, 0]
    # Twelve and a bit: 3 rows of 8 + 5 slots, of which 16 hold prompts after the first pass.
    assert (served.steps[0].slots_used, served.steps[0].slots_empty) == (39, 39 - 16)


def test_static_batches_take_who_is_there() -> None:
    trace = [Arrival(t, Request(text(3), 2)) for t in (1.0, 1.5, 2.5, 9.0)]
    served = serve_static(toy(), trace, rows=3, clock=LogicalClock())
    assert [record.started for record in served.requests] == [1.0, 3.0, 3.0, 9.0]


# ---- The picture


def record(id: int, arrival: float, ended: float) -> RequestRecord:
    return RequestRecord(id, "length", 0, arrival, arrival, ended, ended, ended,
                         1, 0, 1, 1, 0, 0, 0)  # fmt: skip


def ran(number: int, start: float, end: float, *who: tuple[int, Any]) -> StepRecord:
    return StepRecord(number, start, end, 0.0, tuple(Ran(id, phase, 1) for id, phase in who),
                      1, 0, 1, 0, (), 0, 0, 0, 0, 0)  # fmt: skip


STEPS = [
    ran(0, 0.0, 1.0, (0, "prefill")),
    ran(1, 1.0, 2.5, (0, "decode"), (1, "prefill")),
    ran(2, 2.5, 3.0, (0, "decode")),
    ran(3, 5.0, 6.0, (0, "decode"), (1, "recompute")),
]


def test_spans_of_a_phase_join_where_nothing_is_between() -> None:
    assert runs_of("decode", STEPS) == {0: [(1.0, 2.0), (5.0, 1.0)]}
    assert runs_of("prefill", STEPS) == {0: [(0.0, 1.0)], 1: [(1.0, 1.5)]}
    assert runs_of("recompute", STEPS) == {1: [(5.0, 1.0)]}


def test_a_timeline_has_a_bar_for_every_span_and_a_name_for_every_axis() -> None:
    figure, ax = plt.subplots()
    timeline(ax, [record(0, 0.0, 6.0), record(1, 0.5, 6.0)], STEPS, unit="steps")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time (steps)", "request")
    spans = [path for bars in ax.collections for path in bars.get_paths()]
    assert len(spans) == 5
    named = [entry.get_text() for entry in ax.get_legend().get_texts()]
    assert named == ["reads its prompt", "decodes", "computes again"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["0", "1"]
    plt.close(figure)


def test_a_timeline_of_an_engine_and_of_static_batches() -> None:
    trace = make_trace(12, 0.5, SMALL)
    server = engine(blocks=8)
    replay(server, trace)
    served = serve_static(toy(), trace, rows=4, clock=LogicalClock())
    for requests_, steps in ((server.requests, server.steps), (served.requests, served.steps)):
        figure, ax = plt.subplots()
        timeline(ax, list(requests_), list(steps))
        assert len(ax.get_yticks()) == 12
        plt.close(figure)


def test_a_timeline_of_something_else_is_refused() -> None:
    figure, ax = plt.subplots()
    with pytest.raises(ValueError, match="one of steps"):
        timeline(ax, [], [3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="ax must be"):
        timeline(None, [], [])  # type: ignore[arg-type]
    plt.close(figure)


# ---- Bad input


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Mix(prompt=(9, 3)), "the smaller one first"),
        (lambda: Mix(new=(0, 3)), "two lengths from 1 on"),
        (lambda: Mix(shared=1.5), "a share from 0 to 1"),
        (lambda: Mix(vocab_size=0), "vocab_size"),
        (lambda: make_trace(0, 1.0), "requests must be"),
        (lambda: make_trace(3, 0.0), "rate must be"),
        (lambda: make_trace(3, 1.0, seed="a"), "seed must be"),
        (lambda: LogicalClock(-1.0), "per_forward must be"),
        (lambda: replay(engine(), [Request([1])]), "an arrival must be"),
        (lambda: replay(engine(), make_trace(3, 1.0)[::-1]), "in order"),
        (lambda: replay(None, []), "engine must be"),
        (lambda: simulate(None, []), "scheduler must be"),
        (lambda: serve_static(toy(), [], 0), "rows must be"),
        (lambda: serve_static(toy(), [Arrival(0, Request([1], 90))], 1), "64"),
        (lambda: serve_static(toy(), [Arrival(0, Request([99]))], 1), "from 0 to 28"),
    ],
)
def test_what_cannot_be(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        for _ in call() or ():
            pass


def test_outputs_of_one_engine_are_in_order() -> None:
    server = engine()
    for request in requests(6):
        server.add(request)
    assert list(texts(server.run())) == list(range(6))
