"""What breaks ends for whom it concerns, and for nobody else.

A short soak by default. ``KVBOOK_LONG_TESTS=1`` runs 10,000 requests, which takes minutes.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from oracles.serving import alone, check_blocks, engine, requests, texts
from oracles.toys import text, toy
from torch import Tensor

from kvbook.cache import PrefixCache
from kvbook.errors import CacheFullError, QueueFullError, UnknownRequestError
from kvbook.generate import Sampler, greedy
from kvbook.model.transformer import Attention
from kvbook.serve import Engine, LogicalClock, Request

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = os.environ.get("KVBOOK_LONG_TESTS") == "1"


class Broken(RuntimeError):
    """What the tests inject."""


@contextmanager
def breaking(when: Callable[[int], bool], error: type[BaseException] = Broken) -> Iterator[None]:
    """Layer l of the next pass raises where ``when(l)`` says so, after it has stored its keys."""
    forward = Attention.forward

    def spoiled(layer: Any, *arguments: Any) -> Any:
        out = forward(layer, *arguments)
        if when(layer.layer):
            raise error(f"layer {layer.layer} broke")
        return out

    with mock.patch.object(Attention, "forward", spoiled):
        yield


@dataclass(frozen=True)
class Faulty(Sampler):
    """Raises, or gives what is no token, at its n-th draw."""

    at: int = 0
    gives: Any = None

    def __call__(self, logits: Tensor) -> Tensor:
        count = COUNTS[id(self.generator)] = COUNTS.get(id(self.generator), -1) + 1
        if count < self.at:
            return super().__call__(logits)
        if self.gives is None:
            raise Broken("the sampler broke")
        return self.gives


COUNTS: dict[int, int] = {}


# ---- A forward pass that raises


@pytest.mark.parametrize("layer", [0, 1])
def test_a_pass_that_raises_ends_its_own_rows_with_the_error(layer: int) -> None:
    server = engine(blocks=40, token_budget=40)
    decoding = [server.add(request) for request in (Request(text(5), 6), Request(text(7), 6))]
    found = texts(server.step())
    late = server.add(Request(text(9), 3))
    passes = iter([False, True])  # the second one reads the prompt
    with breaking(lambda at: at == layer and next(passes)):
        outputs = server.step()
    [last] = [output for output in outputs if output.id == late]
    assert last.reason == "error"
    assert isinstance(last.error, Broken)
    check_blocks(server.prefix, server.scheduler.running)
    for output in [*outputs, *server.run()]:
        found.setdefault(output.id, []).extend(output.tokens)
    assert found == {
        decoding[0]: alone(Request(text(5), 6)), decoding[1]: alone(Request(text(7), 6)), late: [],
    }  # fmt: skip
    assert server.pool.in_use == 0


def test_all_rows_of_a_pass_that_raises_end() -> None:
    server = engine()
    ids = [server.add(Request(text(5, seed=n), 6)) for n in range(2)]
    server.step()
    with breaking(lambda layer: layer == 0):
        outputs = server.step()
    assert [(output.id, output.reason) for output in outputs] == [(id, "error") for id in ids]
    assert (server.busy, server.pool.in_use) == (False, 0)


def test_what_a_broken_pass_had_written_is_found_by_nobody() -> None:
    server = engine()
    server.add(Request(text(9), 3))
    with breaking(lambda layer: layer == 1):
        assert [output.reason for output in server.step()] == ["error"]
    assert server.prefix.cached_blocks == 0
    id = server.add(Request(text(9), 3))
    assert texts(server.run())[id] == alone(Request(text(9), 3))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_step_is_taken_again(error: type[BaseException], drafts: int) -> None:
    """Whatever the user stops, the next step goes on where this one stood: no token is lost."""
    chance = Random(1)
    server = engine(blocks=12, token_budget=6)
    asked = {server.add(r): r for r in requests(10, seed=2, drafts=drafts)}
    found: dict[int, list[int]] = {}
    interrupted = 0
    while server.busy:
        try:
            with breaking(lambda layer: chance.random() < 0.1, error):
                outputs = server.step()
        except error:
            interrupted += 1
            assert server.cache.lengths == ()
            continue
        for output in outputs:
            found.setdefault(output.id, []).extend(output.tokens)
    assert interrupted > 10
    assert found == {id: alone(request) for id, request in asked.items()}


@dataclass(frozen=True)
class Interrupted(Sampler):
    """Is interrupted after each second draw, when its generator has moved on already."""

    def __call__(self, logits: Tensor) -> Tensor:
        drawn = super().__call__(logits)
        count = COUNTS[id(self.generator)] = COUNTS.get(id(self.generator), 0) + 1
        if count % 2:
            raise KeyboardInterrupt
        return drawn


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_draw_that_was_interrupted_comes_again(drafts: int) -> None:
    COUNTS.clear()
    server = engine(blocks=40)
    request = Request(text(4, seed=2) * 3, 12, Interrupted(temperature=1.0), 5, drafts=drafts)
    server.add(request)
    found, interrupted = [], 0
    while server.busy:
        try:
            found += [token for output in server.step() for token in output.tokens]
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted > 5
    assert found == alone(replace(request, sampler=Sampler(temperature=1.0)))


@pytest.mark.parametrize("call", ["commit", "retract", "end"])
def test_an_interrupt_between_a_token_and_its_place_in_the_cache(call: str) -> None:
    chance, interrupted = Random(2), 0
    done = getattr(PrefixCache, call)

    def interrupting(*arguments: Any) -> Any:
        if chance.random() < 0.2:
            raise KeyboardInterrupt
        return done(*arguments)

    server = engine(blocks=12, token_budget=30)
    repeating = [Request(text(3, seed=n) * 4, 9 + n, seed=n, drafts=3) for n in range(6)]
    asked = {server.add(r): r for r in [*requests(10, seed=2, drafts=3), *repeating]}
    found: dict[int, list[int]] = {}
    with mock.patch.object(PrefixCache, call, interrupting):
        while server.busy:
            try:
                for output in server.step():
                    found.setdefault(output.id, []).extend(output.tokens)
            except KeyboardInterrupt:
                interrupted += 1
    assert interrupted > 5
    assert found == {id: alone(request) for id, request in asked.items()}
    assert server.pool.in_use == 0


# ---- A sampler that raises


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (None, "the sampler broke"),
        (torch.tensor([29]), "the sampler gave tensor([29])"),
        (torch.tensor([-1]), "the sampler gave tensor([-1])"),
        (torch.tensor([1, 2]), "one token for each"),
        (7, "one token for each"),
    ],
)
def test_a_sampler_that_fails_ends_its_own_request_only(gives: Any, words: str) -> None:
    COUNTS.clear()
    server = engine(blocks=40)
    good = server.add(Request(text(5), 6))
    bad = server.add(Request(text(5), 6, Faulty(at=2, gives=gives)))
    outputs = list(server.run())
    found = texts(outputs)
    assert found == {good: alone(Request(text(5), 6)), bad: alone(Request(text(5), 2))}
    [last] = [output for output in outputs if output.id == bad and output.reason]
    assert last.reason == "error"
    assert words in str(last.error)
    assert server.pool.in_use == 0


def test_logits_that_are_not_numbers_concern_one_row() -> None:
    model = toy(seed=3)
    server = Engine(model, 40, 4, max_rows=4, clock=LogicalClock())
    poison, before = 28, model.embedding.weight[28].clone()
    clean = [token % 28 for token in text(6)]
    try:
        model.embedding.weight[poison] = float("nan")
        good, bad = server.add(Request(clean, 4)), server.add(Request([1, poison, 2, 3, 4, 5], 4))
        outputs = {output.id: output for output in server.run() if output.reason}
    finally:
        model.embedding.weight[poison] = before
    assert outputs[good].reason == "length"
    assert "not-a-number" in str(outputs[bad].error)


# ---- Bad requests


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": []}, "at least one integer token id"),
        ({"prompt": "text"}, "at least one integer token id"),
        ({"prompt": [True]}, "at least one integer token id"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a positive integer, got 0"),
        ({"sampler": 1.0}, "sampler must be a Sampler"),
        ({"sampler": Sampler(1.0, generator=torch.Generator())}, "give the request a seed"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"stop_tokens": 5}, "one token is"),
        ({"stop_tokens": ["a"]}, "stop_tokens must be a list"),
        ({"priority": 10}, "priority must be an integer from 0 to 9"),
        ({"priority": True}, "priority must be"),
        ({"deadline": 0}, "deadline must be a time above 0"),
        ({"deadline": float("nan")}, "deadline must be"),
        ({"identity": "tenant"}, "identity must be a Identity"),
        ({"drafts": -1}, "drafts must be"),
        ({"drafts": 1.0}, "drafts must be"),
    ],
)
def test_a_request_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Request(**{"prompt": [1, 2], **fields})


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (Request([1, 29]), ValueError, "from 0 to 28, got 29"),
        (Request([1, -1]), ValueError, "from 0 to 28, got -1"),
        (Request([1], stop_tokens=[29]), ValueError, "from 0 to 28"),
        (Request([1] * 60, 9), CacheFullError, "68 positions, but the model has 64"),
        (Request([1] * 30, 12), CacheFullError, "write 41 tokens, but the pool holds 40"),
        ([1, 2, 3], ValueError, "must be a Request"),
    ],
)
def test_what_this_engine_cannot_serve_is_refused_and_the_others_go_on(
    request_: Any, error: type[ValueError], words: str
) -> None:
    server = engine(blocks=10)
    good = Request(text(5), 6)
    server.add(good)
    server.step()
    with pytest.raises(error, match=words):
        server.add(request_)
    assert list(server.scheduler.jobs) == list(server._samplers) == [0]
    assert texts(server.run())[0] == alone(good)[1:]


def test_a_full_queue_and_an_unknown_request_change_nothing() -> None:
    server = engine(max_waiting=1)
    server.add(Request(text(5), 6))
    with pytest.raises(QueueFullError):
        server.add(Request(text(5), 6))
    with pytest.raises(UnknownRequestError):
        server.cancel(1)
    server.cancel(0)
    with pytest.raises(UnknownRequestError):
        server.cancel(0)
    assert [output.reason for output in server.run()] == ["cancelled"]
    assert not server._samplers


def test_a_model_with_two_kinds_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="layers are of 2 kinds"):
        Engine(toy(window=(3, None)), 8)


@pytest.mark.parametrize(
    "limits",
    [{"blocks": 0}, {"block_size": 0}, {"token_budget": 2}, {"max_rows": 0}, {"history": 0},
     {"clock": 1}, {"fingerprint": 1.0}, {"model": None}],
)  # fmt: skip
def test_an_engine_that_cannot_be(limits: dict[str, Any]) -> None:
    given = {"model": toy(), "blocks": 8, **limits}
    with pytest.raises(ValueError, match=r"got|budget"):
        Engine(**given)


# ---- Everything at once


def soak(n: int, seed: int) -> Engine:
    """Requests come, go, are cancelled, run out of time, and break; whoever is left is right."""
    chance = Random(seed)
    server = engine(blocks=14, token_budget=12, max_waiting=8, history=n)
    pool_of_requests = requests(50, seed=seed)
    asked: dict[int, Request] = {}
    found: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    refused = 0
    COUNTS.clear()
    while len(asked) < n or server.busy:
        while len(asked) < n and chance.random() < 0.5:
            request = chance.choice(pool_of_requests)
            changes: dict[str, Any] = {
                "drafts": chance.choice([0, 0, 3]),
                "priority": chance.choice([0, 0, 0, 2, 9]),
                "deadline": chance.choice([None] * 9 + [chance.randint(1, 40)]),
            }
            if chance.random() < 0.05:
                changes["sampler"] = Faulty(at=chance.randint(0, 5))
            try:
                asked[server.add(replace(request, **changes))] = replace(request, **changes)
            except QueueFullError:
                refused += 1
        if server.scheduler.jobs and chance.random() < 0.02:
            server.cancel(chance.choice(list(server.scheduler.jobs)))
        breaks = chance.choice([0, 1]) if chance.random() < 0.02 else None
        interrupts = chance.choice([0, 1]) if chance.random() < 0.02 else None
        outputs = []
        try:
            with breaking(lambda layer, at=breaks: layer == at), \
                 breaking(lambda layer, at=interrupts: layer == at, KeyboardInterrupt):
                outputs = server.step()
        except KeyboardInterrupt:
            pass
        for output in outputs:
            found.setdefault(output.id, []).extend(output.tokens)
            assert output.id not in ended
            if output.reason:
                ended[output.id] = output.reason
        check_blocks(server.prefix, server.scheduler.running)
    assert set(ended) == set(asked) == set(found)
    assert refused
    for id, request in asked.items():
        broken = isinstance(request.sampler, Faulty)
        whole = alone(replace(request, sampler=greedy) if broken else request)
        if ended[id] == "length":
            assert found[id] == whole, id
        else:
            assert found[id] == whole[: len(found[id])], id
        assert ended[id] != "stop"
    assert {"length", "cancelled", "deadline", "error"} == set(ended.values())
    assert server.pool.in_use == 0
    assert not server._samplers
    assert not server.scheduler.jobs
    assert not server.prefix._live
    return server


@pytest.mark.parametrize("seed", range(2))
def test_a_soak(seed: int) -> None:
    server = soak(5000 if LONG else 150, seed)
    assert sum(record.preemptions for record in server.requests) > 0
    assert sum(record.cached_tokens for record in server.requests) > 0
    assert sum(record.accepted_tokens for record in server.requests) > 0
