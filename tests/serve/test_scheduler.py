"""Who runs next: the rules of the scheduler, one by one and under random orders. No tensors."""

import ast
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from oracles.serving import check_blocks, scheduler

import kvbook.serve.scheduler as module
from kvbook.cache.block_key import Identity
from kvbook.errors import CacheFullError, OutOfBlocksError, QueueFullError, UnknownRequestError
from kvbook.serve import LogicalClock, Request, Scheduler, Work


def asked(prompt: int = 4, new: int = 4, start: int = 0, **fields: Any) -> Request:
    """A prompt that shares no block with one of another ``start``."""
    return Request([1000 * start + token for token in range(prompt)], new, **fields)


def step(of: Scheduler, token: int = 0) -> list[Work]:
    plan = of.schedule()
    of.clock.forward(sum(work.count for work in plan))
    for work in plan:
        of.record(work, [token] if work.draws else [])
    return plan


def counts(plan: list[Work]) -> dict[int, int]:
    return {work.job.id: work.count for work in plan}


def ids(jobs: Any) -> list[int]:
    return [job.id for job in jobs]


# ---- One rule after the other


def test_a_prompt_is_read_in_pieces_of_the_budget_and_then_decoded_one_by_one() -> None:
    of = scheduler(token_budget=4)
    of.add(asked(prompt=10, new=3))
    assert [counts(step(of)) for _ in range(5)] == [{0: n} for n in (4, 4, 2, 1, 1)]
    [ended] = of.ended
    assert (ended.record.reason, ended.record.new_tokens, ended.record.computed_tokens) == (
        "length", 3, 12,
    )  # fmt: skip
    assert not of.jobs


def test_who_decodes_gets_a_token_before_any_prompt_is_read() -> None:
    of = scheduler(blocks=40, token_budget=6)
    of.add(asked(prompt=3, start=1))
    of.add(asked(prompt=3, start=2))
    step(of)
    of.add(asked(prompt=20, start=3))
    assert counts(step(of)) == {0: 1, 1: 1, 2: 4}


def test_a_request_with_a_head_start_does_not_stop_who_decodes() -> None:
    of = scheduler(blocks=40, token_budget=4)
    of.add(asked(prompt=3, start=1))
    step(of)
    of.add(asked(prompt=20, start=2, priority=9))
    assert counts(step(of)) == {0: 1, 1: 3}


def test_the_rest_of_the_budget_begins_the_next_prompts_in_order() -> None:
    of = scheduler(blocks=40, token_budget=10)
    for start in (1, 2, 3):
        of.add(asked(prompt=6, start=start))
    assert counts(step(of)) == {0: 6, 1: 4}
    assert ids(of.waiting) == [2]


def test_no_more_rows_than_allowed() -> None:
    of = scheduler(blocks=40, token_budget=40, max_rows=2)
    for start in range(4):
        of.add(asked(start=start))
    assert counts(step(of)) == {0: 4, 1: 4}


def test_a_request_begins_when_there_are_blocks_for_all_its_tokens() -> None:
    of = scheduler(blocks=4)
    of.add(asked(prompt=9, new=3, start=1))  # three blocks of four
    of.add(asked(prompt=7, new=1, start=2))  # two
    assert counts(step(of)) == {0: 9}
    assert [counts(step(of)) for _ in range(3)] == [{0: 1}, {0: 1}, {1: 7}]


def test_what_is_found_needs_no_blocks_and_is_not_computed_again() -> None:
    of = scheduler(blocks=4)
    of.add(asked(prompt=9, new=4))  # three of four blocks
    step(of)
    of.add(asked(prompt=9, new=1))  # the same: two blocks found, one more needed
    assert counts(step(of)) == {0: 1, 1: 1}
    assert of.ended[0].record.cached_tokens == 8
    assert of.prefix.stats.cached_tokens == 8


def test_nobody_behind_the_first_that_waits_begins_before_it() -> None:
    of = scheduler(blocks=4)
    of.add(asked(prompt=9, new=3, start=1))
    of.add(asked(prompt=8, new=1, start=2))  # does not fit beside it
    of.add(asked(prompt=1, new=1, start=3))  # would
    assert [set(counts(step(of))) for _ in range(4)] == [{0}, {0}, {0}, {1, 2}]


def test_the_last_in_order_gives_way_and_begins_again_with_what_it_has_drawn() -> None:
    """Two blocks each, and the pool has four: at the ninth token the younger one gives way."""
    of = scheduler(blocks=4)
    of.add(asked(prompt=7, new=4, start=1))
    of.add(asked(prompt=7, new=4, start=2))
    plans = [counts(step(of, token=7)) for _ in range(3)]
    assert plans == [{0: 7, 1: 7}, {0: 1, 1: 1}, {0: 1}]
    assert (ids(of.preempted), ids(of.waiting)) == ([1], [1])
    assert of.jobs[1].drawn == [7, 7]
    assert counts(step(of)) == {0: 1}  # no room yet: seven tokens and two drawn
    [plan] = [step(of)]
    assert (plan[0].job.id, plan[0].count, plan[0].phase) == (1, 5, "recompute")  # one block found
    assert plan[0].job.running.tokens.tolist()[-2:] == [7, 7]
    assert of.prefix.stats.prompts == 2  # a request that begins again is no further prompt
    while of.jobs:
        step(of)
    assert [ended.record.preemptions for ended in of.ended] == [0, 1]


def test_the_lowest_priority_gives_way_even_if_it_came_first() -> None:
    of = scheduler(blocks=4)
    of.add(asked(prompt=7, new=4, start=1))
    of.add(asked(prompt=7, new=4, start=2, priority=1))
    for _ in range(3):
        step(of)
    assert (ids(of.preempted), ids(of.running)) == ([0], [1])


def test_nobody_begins_in_a_step_in_which_somebody_gave_way() -> None:
    of = scheduler(blocks=5, max_rows=2)
    of.add(asked(prompt=7, new=6, start=1))
    of.add(asked(prompt=11, new=2, start=2))
    step(of), step(of)
    of.add(asked(prompt=1, new=1, start=3, priority=9))
    assert set(counts(step(of))) == {0}
    assert ids(of.preempted) == [1]
    assert set(counts(step(of))) == {0, 2}


def test_a_priority_is_a_head_start_of_64_places_for_each_level() -> None:
    of = scheduler(blocks=400, token_budget=400, max_rows=1, max_waiting=400)
    of.add(asked(new=2))  # runs while the others come
    step(of)
    for number in range(1, 200):
        of.add(asked(start=number, new=1))
    first = of.add(asked(start=200, new=1, priority=1)).id
    second = of.add(asked(start=201, new=1, priority=2)).id
    step(of)
    order = []
    while of.jobs:
        order += counts(step(of))
    assert [id for id in order[order.index(first) :] if id < first] == list(range(136, 200))
    assert [id for id in order[order.index(second) :] if id < 200] == list(range(73, 200))
    rest = [id for id in order if id not in (first, second)]
    assert rest == sorted(rest)


def test_a_deadline_ends_a_request_wherever_it_stands() -> None:
    of = scheduler(blocks=4, clock=LogicalClock(per_forward=1.0))
    of.add(asked(prompt=9, new=6, start=1, deadline=2.5))  # runs
    of.add(asked(prompt=9, new=6, start=2, deadline=1.5))  # waits
    of.add(asked(prompt=9, new=2, start=3, deadline=60.0))  # is served before
    while of.jobs:
        step(of)
    assert [(e.job.id, e.record.reason, e.record.new_tokens) for e in of.ended] == [
        (1, "deadline", 0), (0, "deadline", 3), (2, "length", 2),
    ]  # fmt: skip
    assert of.ended[0].record.queue_time == of.ended[0].record.ended == 2.0
    assert of.prefix.pool.in_use == 0


def test_cancelling_frees_blocks_at_once_and_only_once() -> None:
    of = scheduler()
    of.add(asked(prompt=9))
    of.add(asked(prompt=9))
    step(of)
    of.cancel(0)
    check_blocks(of.prefix, of.running)
    assert ids(of.running) == [1]
    with pytest.raises(UnknownRequestError, match="no request 0 is waiting or running"):
        of.cancel(0)
    of.cancel(1)
    assert of.prefix.pool.in_use == 0
    assert [ended.record.reason for ended in of.ended] == ["cancelled", "cancelled"]


def test_a_request_that_waits_is_cancelled_without_a_trace() -> None:
    of = scheduler(max_rows=1)
    for start in range(3):
        of.add(asked(start=start))
    step(of)
    of.cancel(1)
    assert (ids(of.waiting), of.prefix.stats.prompts) == ([2], 1)


@pytest.mark.parametrize("id", [True, "0", None, 5, -1])
def test_no_such_request(id: Any) -> None:
    of = scheduler()
    of.add(asked()), of.add(asked())
    with pytest.raises(UnknownRequestError, match=f"no request {id!r}"):
        of.cancel(id)
    assert len(of.jobs) == 2


def test_a_stop_token_ends_the_text_before_it() -> None:
    of = scheduler()
    of.add(asked(new=9, stop_tokens=[5]))
    step(of, token=4), step(of, token=5)
    [ended] = of.ended
    assert (ended.job.drawn, ended.record.reason) == ([4], "stop")


# ---- Refused at the door


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    of = scheduler(blocks=4)
    of.add(asked(prompt=13, new=4))  # 16 tokens are written: the last one never is
    with pytest.raises(CacheFullError, match="write 17 tokens, but the pool holds 16 in 4 blocks"):
        of.add(asked(prompt=13, new=5))
    assert len(of.jobs) == 1


def test_a_full_queue_refuses_and_has_room_again() -> None:
    of = scheduler(max_waiting=2)
    of.add(asked()), of.add(asked())
    with pytest.raises(QueueFullError, match="2 requests wait already, and the limit is 2"):
        of.add(asked())
    step(of)
    assert of.add(asked()).id == 2


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"token_budget": 3}, "budget of 3 tokens leaves none for some of 4 rows"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_waiting": True}, "max_waiting"),
        ({"clock": 3.0}, "clock must be"),
    ],
)
def test_limits_that_cannot_be(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scheduler(**limits)


def test_blocks_that_somebody_else_holds_are_no_reason_to_wait_for_ever() -> None:
    of = scheduler(blocks=3)
    of.prefix.begin(range(8))
    of.add(asked(prompt=9, new=1))
    with pytest.raises(OutOfBlocksError):
        of.schedule()


# ---- Found, gone, and found again


def test_what_was_found_when_a_request_came_is_looked_up_again_when_it_begins() -> None:
    """GeeeekExplorer/nano-vllm#233: a count of cached tokens, kept from before the pool changed."""
    of = scheduler(blocks=4)
    of.add(asked(prompt=9, new=1))
    step(of)
    of.add(asked(prompt=13, new=4, start=1))  # takes the whole pool, and what was cached is gone
    of.add(asked(prompt=9, new=1))  # when it came, 8 tokens could be found
    plans = [counts(step(of)) for _ in range(5)]
    assert plans == [{1: 13}, {1: 1}, {1: 1}, {1: 1}, {2: 9}]
    assert of.ended[-1].record.cached_tokens == 0


def test_identities_do_not_find_each_other() -> None:
    of = scheduler()
    for salt in ("a", "b", "a"):
        of.add(asked(prompt=9, new=1, identity=Identity(salt=salt)))
        step(of)
    assert [ended.record.cached_tokens for ended in of.ended] == [0, 0, 8]


# ---- Any order of events


def check_step(of: Scheduler, plan: list[Work]) -> None:
    assert sum(work.count for work in plan) <= of.token_budget
    assert all(work.count > 0 for work in plan)
    times = Counter(work.job.id for work in plan)
    assert all(n == 1 for n in times.values()), "scheduled twice"
    assert [work.job for work in plan if work.job not in of.running] == []
    assert len(of.running) <= of.max_rows
    assert set(of.jobs) == {*ids(of.waiting), *ids(of.running)}
    assert len(of.jobs) == len(of.waiting) + len(of.running)
    for line in (of.waiting, of.running):
        keys = [(job.id - 64 * job.request.priority, -job.request.priority) for job in line]
        assert keys == sorted(keys)
    for work in plan:
        job, sequence = work.job, work.job.running
        assert sequence.tokens.tolist()[: len(job.request.prompt)] == list(job.request.prompt)
        text = list(job.request.prompt) + job.drawn
        assert sequence.tokens.tolist() == text + list(work.drafts)
        # What is written, found or computed, and what is planned, is never more than the text.
        assert sequence.written + work.count <= len(sequence.tokens)
        assert work.tokens == sequence.tokens.tolist()[sequence.written :][: work.count]
    if of.running:
        assert of.running[0] in [work.job for work in plan], "the first in order stands still"


def random_life(seed: int, drafts: int) -> int:
    """400 steps with whatever can happen, checked after each. Returns how many gave way."""
    chance = Random(seed)

    def guesses(tokens: Any, k: int) -> list[int]:
        return [0] * chance.randint(0, k)

    of = scheduler(
        blocks=chance.choice([6, 9, 14]), block_size=chance.choice([1, 2, 4]),
        token_budget=chance.choice([4, 7, 30]), propose=guesses,
    )  # fmt: skip
    added: dict[int, Request] = {}
    preempted = 0
    for turn in range(400):
        if turn < 300 and chance.random() < 0.4:
            deadline = chance.choice([None, None, None, 1.0, 30.0])
            request = asked(
                chance.randint(1, 10), chance.randint(1, 9), chance.choice([0, 0, 1]),
                priority=chance.choice([0, 0, 0, 1, 9]), deadline=deadline, drafts=drafts,
            )  # fmt: skip
            try:
                added[of.add(request).id] = request
            except CacheFullError:
                pool = of.prefix.pool
                assert len(request.prompt) + request.max_new_tokens - 1 > (
                    pool.blocks * pool.block_size
                )
        if of.jobs and chance.random() < 0.1:
            of.cancel(chance.choice(list(of.jobs)))
        check_blocks(of.prefix, of.running)
        plan = of.schedule()
        preempted += len(of.preempted)
        check_step(of, plan)
        check_blocks(of.prefix, of.running)
        of.clock.forward(1)
        for work in plan:
            if chance.random() < 0.05:
                of.end(work.job, "error", RuntimeError("its pass broke off"))
            elif chance.random() < 0.95:  # else it was not recorded: the step was interrupted
                accepted = chance.randint(0, len(work.drafts))
                drawn = [*work.drafts[:accepted], chance.randint(1, 9)]
                of.record(work, drawn if work.draws else [])
        check_blocks(of.prefix, of.running)
    while of.jobs:
        for work in of.schedule():
            of.record(work, [1] if work.draws else [])
    assert sorted(ended.job.id for ended in of.ended) == sorted(added)
    assert of.prefix.pool.in_use == 0
    return preempted


@pytest.mark.parametrize("drafts", [0, 3])
def test_any_order_of_arrivals_cancels_preemptions_and_priorities(drafts: int) -> None:
    assert sum(random_life(seed, drafts) for seed in range(16)) > 40


@pytest.mark.parametrize("seed", range(8))
def test_nobody_starves(seed: int) -> None:
    """The first n requests need no more steps than they have tokens, whatever comes behind."""
    chance = Random(seed)
    of = scheduler(blocks=5, block_size=2, token_budget=4)
    tokens, steps, coming = [], 0, 60
    while coming or of.jobs:
        while coming and len(of.jobs) < 8:
            prompt, new = chance.randint(1, 6), chance.randint(1, 5)
            of.add(asked(prompt, new, start=coming))
            tokens.append(prompt + new)
            coming -= 1
        step(of)
        steps += 1
        assert steps <= sum(tokens)
        over = {ended.job.id for ended in of.ended}
        late = [n for n in range(len(tokens)) if n not in over and steps >= sum(tokens[: n + 1])]
        assert not late


def test_a_stream_of_high_priorities_passes_a_low_one_a_bounded_number_of_times() -> None:
    of = scheduler(max_rows=1, blocks=40, token_budget=40)
    of.add(asked(new=3))
    step(of)
    low = of.add(asked(start=1, new=1)).id
    served = 0
    while low in of.jobs:
        of.add(asked(start=served + 2, new=1, priority=9))
        step(of)
        served += 1
        assert served < 700
    assert 9 * 64 - 3 <= served <= 9 * 64 + 3


def test_the_same_requests_give_the_same_plans() -> None:
    def run() -> list[list[tuple[int, int, str]]]:
        chance, of, plans = Random(3), scheduler(blocks=6), []
        for start in range(30):
            of.add(asked(chance.randint(1, 9), chance.randint(1, 9), start % 4))
        while of.jobs:
            plans.append([(w.job.id, w.count, w.phase) for w in step(of)])
        return plans

    assert run() == run()


# ---- What it costs


def test_the_scheduler_imports_no_tensors() -> None:
    names = {
        name
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom)
                     else [alias.name for alias in node.names])
    }  # fmt: skip
    assert not {name for name in names if name and name.split(".")[0] in {"torch", "numpy"}}
    assert not {name for name in names if name and name.startswith("kvbook.model")}


def test_nothing_is_kept_of_a_request_that_has_ended() -> None:
    of = scheduler(blocks=8)
    for number in range(50):
        of.add(asked(start=number, deadline=1e9))
        while of.jobs:
            step(of)
        of.ended.clear()
    kept = [len(thing) for thing in (of.jobs, of.waiting, of.running, of.prefix._live)]
    assert kept == [0, 0, 0, 0]
