"""Static batching, for comparison: a batch starts together, is padded, and ends with its last row.

Knows: one batch after the other. Does not know: blocks, prefixes, preemption.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvbook.cache.sizes import check_class, check_sizes
from kvbook.generate.loops import check_request, choose, left_pad
from kvbook.generate.sampling import Sampler, seeded
from kvbook.model.transformer import Transformer, check_tokens
from kvbook.serve.clock import Clock, WallClock
from kvbook.serve.records import Phase, Ran, Reason, RequestRecord, StepRecord
from kvbook.serve.request import Request
from kvbook.serve.trace import Arrival, arrivals


@dataclass(frozen=True)
class Served:
    """New tokens of each request, and the records that an ``Engine`` makes as well."""

    texts: list[list[int]]
    requests: list[RequestRecord]
    steps: list[StepRecord]


def serve_static(
    model: Transformer, trace: Sequence[Arrival], rows: int, clock: Clock | None = None
) -> Served:
    """Serve a trace in batches: whoever waits when the last batch has ended, at most ``rows``.

    Prompts are padded on the left to the longest of their batch. A row that has ended keeps its
    place, and takes nothing more, until the last one ends. Each request has its own sampler, stop
    tokens and number of new tokens; priorities, deadlines and drafts are not looked at.
    """
    check_class("model", model, Transformer, "load_smollm2() or Transformer(config)")
    check_sizes(rows=rows)
    waiting = list(enumerate(arrivals(trace)))
    for _, one in waiting:
        request = one.request
        check_request(model, len(request.prompt), request.max_new_tokens, request.stop_tokens,
                      request.sampler)
        check_tokens(torch.tensor([request.prompt]), model.config.vocab_size)
    clock = WallClock() if clock is None else clock
    served, start = Served([[] for _ in trace], [], []), clock.now()
    while waiting:
        clock.wait_until(start + waiting[0][1].time)
        here = [one for one in waiting[:rows] if start + one[1].time <= clock.now()]
        del waiting[: len(here)]
        batch = [
            _Row(id, start + one.time, one.request, _own(one.request, model), served.texts[id])
            for id, one in here
        ]
        _serve_batch(model, batch, clock, served, late=[start + one.time for _, one in waiting])
    return served


@dataclass
class _Row:
    """One request in its batch."""

    id: int
    arrival: float
    request: Request
    sampler: Sampler
    text: list[int]
    first: float | None = None
    last: float | None = None
    reason: Reason | None = None

    def take(self, token: int, now: float) -> None:
        """The next token was drawn; the row may have ended with it."""
        if token in self.request.stop_tokens:
            self.reason = "stop"
            return
        self.text.append(token)
        self.first, self.last = now if self.first is None else self.first, now
        if len(self.text) == self.request.max_new_tokens:
            self.reason = "length"


@torch.inference_mode()
def _serve_batch(
    model: Transformer, batch: list[_Row], clock: Clock, served: Served, late: list[float]
) -> None:
    prompts = [list(row.request.prompt) for row in batch]
    longest = max(map(len, prompts)) + max(row.request.max_new_tokens for row in batch)
    cache = model.new_cache(len(batch), longest)
    began = clock.now()
    phase: Phase = "prefill"
    tokens, counts = left_pad(prompts)
    while any(counts):
        start = clock.now()
        logits = model(tokens.to(model.device), cache, counts=counts, last_only=True)
        clock.forward(tokens.numel())  # padding and ended rows are computed as well
        now = clock.now()
        alive = [place for place, row in enumerate(batch) if row.reason is None]
        for place in alive:
            row = batch[place]
            row.take(int(choose(row.sampler, logits[place : place + 1])), now)
            if row.reason is not None:
                served.requests.append(_record_of(row, began, now))
        slots = len(batch) * longest
        served.steps.append(StepRecord(
            number=len(served.steps), start=start, end=clock.now(), scheduling=0.0,
            ran=tuple(Ran(batch[place].id, phase, counts[place]) for place in alive),
            forwards=1, drawn=sum(batch[place].reason != "stop" for place in alive),
            running=len(batch), waiting=sum(arrival <= start for arrival in late), preempted=(),
            blocks_used=0, blocks_free=0, blocks_evictable=0,
            slots_used=slots, slots_empty=slots - sum(cache.lengths),
        ))  # fmt: skip
        phase, counts = "decode", [int(row.reason is None) for row in batch]
        tokens = torch.tensor([[row.text[-1] if row.text else 0] for row in batch])


def _own(request: Request, model: Transformer) -> Sampler:
    [generator] = seeded([request.seed], model.device)
    return replace(request.sampler, generator=generator)


def _record_of(row: _Row, began: float, now: float) -> RequestRecord:
    assert row.reason is not None
    read = len(row.request.prompt) + len(row.text) - (row.reason == "length")
    return RequestRecord(
        id=row.id, reason=row.reason, priority=row.request.priority, arrival=row.arrival,
        started=began, first_token=row.first, last_token=row.last, ended=now,
        prompt_tokens=len(row.request.prompt), cached_tokens=0, new_tokens=len(row.text),
        computed_tokens=read, preemptions=0, drafted_tokens=0, accepted_tokens=0,
    )  # fmt: skip
