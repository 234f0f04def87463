"""A request gets from an engine what it would get alone, whoever runs beside it."""

from random import Random
from typing import Any

import pytest
import torch
from oracles.serving import WARM, alone, check_blocks, engine, requests, texts
from oracles.toys import LATENT, text, toy

from kvbook.cache import INT8, quantized
from kvbook.cache.block_key import Identity
from kvbook.generate import Sampler, generate_cached
from kvbook.model.transformer import Transformer
from kvbook.serve import Engine, LogicalClock, Request

pytestmark = pytest.mark.usefixtures("one_thread")


def check_right(found: dict[int, list[int]], asked: dict[int, Request]) -> None:
    for id, request in asked.items():
        assert found.get(id, []) == alone(request), id


# ---- Equal to a run alone


def test_requests_that_come_together() -> None:
    server = engine(blocks=64, max_rows=16)
    asked = {server.add(request): request for request in requests(16)}
    check_right(texts(server.run()), asked)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", [0, 4])
def test_any_order_of_arrivals_preemptions_hits_and_cancels(seed: int, drafts: int) -> None:
    """Unused slots hold not-a-number before every step: what is read was written."""
    chance = Random(seed)
    server = engine(blocks=10, token_budget=chance.choice([4, 9, 40]))
    coming = requests(40, seed=seed, drafts=drafts)
    asked: dict[int, Request] = {}
    cancelled: set[int] = set()
    found: dict[int, list[int]] = {}
    reasons: dict[int, list[Any]] = {}
    while coming or server.busy:
        while coming and chance.random() < 0.4:
            request = coming.pop()
            asked[server.add(request)] = request
        if server.scheduler.jobs and chance.random() < 0.03:
            gone = chance.choice(list(server.scheduler.jobs))
            server.cancel(gone)
            cancelled.add(gone)
        server.cache.fill_unused(float("nan"))
        for output in server.step():
            found.setdefault(output.id, []).extend(output.tokens)
            reasons.setdefault(output.id, []).append(output.reason)
        check_blocks(server.prefix, server.scheduler.running)
        assert server.cache.lengths == ()
    assert cancelled
    check_right(found, {id: asked[id] for id in asked if id not in cancelled})
    for id in cancelled:
        whole = alone(asked[id])
        assert whole[: len(found[id])] == found[id]
    ends = {id: "cancelled" if id in cancelled else "length" for id in asked}
    assert {id: given[-1] for id, given in reasons.items()} == ends
    assert not any(reason for given in reasons.values() for reason in given[:-1])
    assert sum(record.preemptions for record in server.requests) > 0
    assert sum(record.cached_tokens for record in server.requests) > 20
    accepted = sum(record.accepted_tokens for record in server.requests)
    assert accepted > 0 if drafts else accepted == 0
    assert server.pool.in_use == 0


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("sampler", [Sampler(), WARM])
def test_a_request_that_gave_way_at_any_place_in_a_block_goes_on_as_if_nothing_was(
    length: int, sampler: Sampler
) -> None:
    """GeeeekExplorer/nano-vllm#217: preempted at the edge of a block, the drawn token was lost."""
    request = Request(text(2, seed=3), 12, sampler, seed=5)
    server = engine()
    id = server.add(request)
    found = []
    while len(request.prompt) + len(found) < length:
        found += [token for output in server.step() for token in output.tokens]
    server.scheduler._preempt(server.scheduler.running[0])
    server.prefix.clear()  # so that everything is computed again
    found += texts(server.run())[id]
    assert found == alone(request)
    [record] = server.requests
    assert (record.preemptions, record.cached_tokens, record.new_tokens) == (1, 0, 12)
    assert record.computed_tokens == 13 + length - 1  # the last one drawn was not computed before


def test_a_seed_belongs_to_the_request_and_not_to_the_row() -> None:
    """vllm-project/vllm#51226: what a request draws depends on its neighbors."""
    request = Request(text(5), 10, WARM, seed=11)
    for others in range(3):
        server = engine(blocks=64)
        for other in requests(others, seed=others):
            server.add(other)
        id = server.add(request)
        assert texts(server.run())[id] == alone(request)
    again = engine()
    assert [*texts(again.run()).values()] == []
    ids = [again.add(request), again.add(request)]
    found = texts(again.run())
    assert found[ids[0]] == found[ids[1]] == alone(request)


def test_each_row_has_its_own_stop_tokens_and_length() -> None:
    """microsoft/onnxruntime-genai#1814: what a row that has ended leaves in the cache."""
    prompt = text(6, seed=1)
    whole = alone(Request(prompt, 12))
    stop = next(token for token in whole if whole.index(token) >= 2)
    server = engine(blocks=40)
    asked = [Request(prompt, 12), Request(prompt, 12, stop_tokens=[stop]), Request(prompt, 3)]
    ids = [server.add(request) for request in asked]
    outputs = list(server.run())
    found = texts(outputs)
    assert [found[id] for id in ids] == [whole, whole[: whole.index(stop)], whole[:3]]
    reasons = {output.id: output.reason for output in outputs if output.reason}
    assert [reasons[id] for id in ids] == ["length", "stop", "length"]
    # A turn that goes on from either finds what was written, and gets what a fresh run gets.
    for id in ids:
        follow_up = Request([*prompt, *found[id], 3, 1], 4)
        assert texts_of(server, follow_up) == alone(follow_up)
        assert server.requests[-1].cached_tokens >= 4


def texts_of(server: Engine, request: Request) -> list[int]:
    id = server.add(request)
    return texts(server.run())[id]


def test_the_stop_token_may_be_the_first() -> None:
    prompt = text(6, seed=1)
    server = engine()
    server.add(Request(prompt, 5, stop_tokens=alone(Request(prompt, 1))))
    [output] = list(server.run())
    assert (output.tokens, output.reason) == ((), "stop")
    assert output.record is not None
    assert (output.record.ttft, output.record.tpot) == (None, None)


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0.4)])
def test_drafts_change_no_token_and_save_steps(drafts: int, sampler: Sampler) -> None:
    """A text that repeats itself; each draft stands exactly if it is what would be drawn."""
    prompt = text(4, seed=2) * 4
    steps = {}
    for k in (0, drafts):
        request = Request(prompt, 24, sampler, drafts=k)
        server = engine()
        storage = [tensor.data_ptr() for tensor in server.cache.tensors]
        assert texts_of(server, request) == alone(request)
        assert [tensor.data_ptr() for tensor in server.cache.tensors] == storage
        [record] = server.requests
        steps[k] = len(server.steps)
        # Every token but the last is computed; of the drafts, those that fell as well.
        fell = record.drafted_tokens - record.accepted_tokens
        assert record.computed_tokens == len(prompt) + 24 - 1 + fell
    assert steps[drafts] < steps[0]


def test_a_stop_token_inside_of_accepted_drafts_ends_the_text_there() -> None:
    prompt = text(4, seed=2) * 4
    whole = alone(Request(prompt, 24))
    for stop in set(whole):
        request = Request(prompt, 24, stop_tokens=[stop], drafts=5)
        server = engine()
        assert texts_of(server, request) == whole[: whole.index(stop)]
        # What can be found is the text and nothing behind it.
        text_ = [*prompt, *whole[: whole.index(stop)]]
        probe = server.prefix.begin([*text_, stop, *whole[whole.index(stop) + 1 :], 1, 2, 3, 4])
        assert probe.cached_tokens == len(text_) // 4 * 4
        assert server.requests[0].accepted_tokens <= len(text_) - len(prompt)


def test_drafts_behind_a_stop_token_do_not_stand() -> None:
    """Guesses that are always right: the text would go on behind its stop token."""
    prompt = text(5, seed=4)
    whole = alone(Request(prompt, 24))
    for place in range(1, 12):
        stop = whole[place]
        end = whole.index(stop)
        server = engine()
        server.scheduler.propose = lambda tokens, k: whole[len(tokens) - len(prompt) :][:k]
        request = Request(prompt, 24, stop_tokens=[stop], drafts=7)
        assert texts_of(server, request) == whole[:end]
        [record] = server.requests
        assert record.accepted_tokens <= end
        probe = server.prefix.begin([*prompt, *whole, 0])
        assert probe.cached_tokens == (len(prompt) + end) // 4 * 4


def test_models_with_one_latent_for_all_heads_and_with_a_window() -> None:
    for model in (toy(**LATENT), toy(window=5)):
        server = Engine(model, 12, 4, token_budget=7, max_rows=4, clock=LogicalClock())
        asked = {server.add(request): request for request in requests(8)}
        found = texts(server.run())
        for id, request in asked.items():
            if request.sampler.temperature == 0:
                [expected] = generate_cached(model, [request.prompt], request.max_new_tokens)
                assert found[id] == expected


def test_a_quantized_store_serves_what_it_serves_alone() -> None:
    """A store that rounds token by token rounds the same in any batch, piece or block."""
    store = quantized(INT8.grouped(6))

    def served(asked: list[Request], **limits: Any) -> list[list[int]]:
        server = engine(store=store, **limits)
        ids = [server.add(request) for request in asked]
        found = texts(server.run())
        return [found[id] for id in ids]

    asked = requests(10)
    together = served(asked, blocks=12, token_budget=5)
    assert together == [served([request])[0] for request in asked]


# ---- How it runs


def test_no_token_is_computed_for_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a pass have equally many new tokens, and all that decode share one."""
    shapes = []
    forward = Transformer.forward

    def counted(model: Any, tokens: Any, *rest: Any, **how: Any) -> Any:
        shapes.append(tuple(tokens.shape))
        assert "counts" not in how
        return forward(model, tokens, *rest, **how)

    monkeypatch.setattr(Transformer, "forward", counted)
    server = engine(blocks=64, token_budget=20)
    for length in (5, 5, 9):
        server.add(Request(text(length, seed=length), 3))
    for number in range(3):
        server.step()
        if not number:
            server.add(Request(text(30), 1))
    assert shapes == [(2, 5), (1, 9), (3, 1), (1, 17), (3, 1), (1, 13)]


def test_other_requests_may_come_while_outputs_are_read() -> None:
    server = engine()
    first, found = server.add(requests(1)[0]), []
    later = requests(2)[1]
    for output in server.run():
        found.append(output.id)
        if output.reason and output.id == first:
            server.add(later)
    assert set(found) == {0, 1}


def test_an_idle_engine_has_nothing_to_do_or_to_tell() -> None:
    server = engine()
    assert (server.busy, server.step(), list(server.run()), len(server.steps)) == (False, [], [], 0)


def test_a_cancelled_request_says_so_once() -> None:
    server = engine()
    id = server.add(Request(text(6), 9))
    [first] = server.step()
    server.cancel(id)
    assert server.pool.in_use == 0
    [last] = list(server.run())
    assert list(first.tokens) == alone(Request(text(6), 1))
    assert (last.tokens, last.reason) == ((), "cancelled")
    assert not server.busy


def test_a_whole_prompt_that_is_found_still_computes_its_last_token() -> None:
    for length, cached in ((8, 4), (9, 8)):
        server = engine()
        request = Request(text(length, seed=4), 2)
        for _ in range(2):
            assert texts_of(server, request) == alone(request)
        assert [record.cached_tokens for record in server.requests] == [0, cached]


def test_tenants_do_not_find_each_other() -> None:
    server = engine()
    for salt in ("a", "b", "a"):
        request = Request(text(9), 1, identity=Identity(salt=salt))
        assert texts_of(server, request) == alone(Request(text(9), 1))
    assert [record.cached_tokens for record in server.requests] == [0, 0, 8]


def test_float32_as_far_as_kernels_allow() -> None:
    """Logits of another shape of batch differ by rounding; here no token is that close."""
    server = Engine(toy(torch.float32), 12, 4, token_budget=9, max_rows=4, clock=LogicalClock())
    asked = {server.add(request): request for request in requests(12)}
    check_right(texts(server.run()), asked)
