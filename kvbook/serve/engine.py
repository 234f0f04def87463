"""Continuous batching: requests come at any time, and each step runs whoever is planned.

Knows: a model, a bound cache over one pool, which rows share a forward pass. Does not know: who
runs next (the scheduler), how a request came in.

Rows with the same number of new tokens share one forward pass: all that decode are one batch, and
a piece of a prompt is another. So no row is padded, and no token is computed for nothing.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbook.cache import BlockPool, PrefixCache, SlotMajorStore
from kvbook.cache.block_key import Part
from kvbook.cache.sizes import check_class, check_sizes
from kvbook.cache.store import NewStore
from kvbook.generate.loops import check_request, choose
from kvbook.generate.prompt_lookup import PromptLookup
from kvbook.generate.sampling import Sampler, greedy, seeded
from kvbook.model.transformer import Transformer, check_tokens
from kvbook.serve.clock import Clock, WallClock
from kvbook.serve.records import Output, Ran, RequestRecord, StepRecord
from kvbook.serve.request import Request
from kvbook.serve.scheduler import Scheduler, Work


class Engine:
    """Serves requests over ``blocks`` blocks of ``block_size`` tokens, shared by all.

    ``add(request)`` takes one and returns its id, ``step()`` runs one step and returns what it
    gave to whom, ``cancel(id)`` ends one, and ``run()`` steps until nothing is left to do. One
    thread at a time.

    A request's tokens are those that it would draw alone: in float64 exactly, in less precision
    as far as kernels sum alike in batches of different shapes. What a request computed stays in
    full blocks for the next that begins alike; so after a change of the weights call
    ``prefix.clear()``, when nothing runs.

    A forward pass or a sampler that raises ends the requests of that pass, with the error in
    their last ``Output``; the others go on. An interrupt (``KeyboardInterrupt``) passes through,
    and the next ``step()`` goes on where this one stood.

    ``requests`` and ``steps`` hold the records of the last ``history`` requests and steps.
    ``token_budget``, ``max_rows`` and ``max_waiting`` are those of ``Scheduler``.

    >>> from kvbook.model.toy import toy_model
    >>> engine = Engine(toy_model(), blocks=8, block_size=4)
    >>> first = engine.add(Request([1, 2, 3], max_new_tokens=4))
    >>> second = engine.add(Request([5, 6, 7, 8, 9], max_new_tokens=2))
    >>> [(output.id, len(output.tokens), output.reason) for output in engine.run()]
    [(0, 1, None), (1, 1, None), (0, 1, None), (1, 1, 'length'), (0, 1, None), (0, 1, 'length')]
    >>> engine.pool.in_use
    0
    """

    def __init__(
        self,
        model: Transformer,
        blocks: int,
        block_size: int = 16,
        *,
        token_budget: int = 256,
        max_rows: int = 32,
        max_waiting: int = 1024,
        store: NewStore = SlotMajorStore,
        fingerprint: Part = None,
        clock: Clock | None = None,
        history: int = 10_000,
    ) -> None:
        check_class("model", model, Transformer, "load_smollm2() or Transformer(config)")
        check_sizes(history=history)
        kinds = len(set(model.layer_kinds))
        if kinds > 1:
            raise ValueError(
                f"the model's layers are of {kinds} kinds, each with blocks of its own, but an "
                "engine finds prefixes in one pool; serve a model whose layers are alike"
            )
        self.clock = WallClock() if clock is None else clock
        self.pool = BlockPool(blocks, block_size)
        self.prefix = PrefixCache(self.pool, fingerprint)
        self.scheduler = Scheduler(
            self.prefix, self.clock, token_budget, max_rows, max_waiting, self._propose
        )
        self.model, self.cache = model, model.new_bound_cache(self.pool, store=store)
        self.requests: deque[RequestRecord] = deque(maxlen=history)
        self.steps: deque[StepRecord] = deque(maxlen=history)
        self._samplers: dict[int, Sampler] = {}  # each with a generator of its own
        self._steps = 0

    @property
    def busy(self) -> bool:
        """Whether a step would have something to do or to tell."""
        return bool(self.scheduler.jobs or self.scheduler.ended)

    def add(self, request: Request) -> int:
        """Take a request into the queue; its id comes with all its outputs.

        Raises ``ValueError`` for tokens outside of the vocabulary, ``CacheFullError`` for a text
        that is longer than the model or than the pool, and ``QueueFullError``; nothing has changed
        then.
        """
        check_class("request", request, Request, "Request(prompt, max_new_tokens)")
        stops = request.stop_tokens
        check_request(
            self.model, len(request.prompt), request.max_new_tokens, stops, request.sampler
        )
        check_tokens(torch.tensor([request.prompt]), self.model.config.vocab_size)
        [generator] = seeded([request.seed], self.model.device)
        id = self.scheduler.add(request).id
        self._samplers[id] = replace(request.sampler, generator=generator)
        return id

    def cancel(self, id: int) -> None:
        """End a request, waiting or running; its blocks are free at once.

        Its last output comes with the next step. Raises ``UnknownRequestError`` for one that has
        ended, or never was.
        """
        self.scheduler.cancel(id)

    def step(self) -> list[Output]:
        """Plan a step, run its forward passes, and say what it gave to whom."""
        start = self.clock.now()
        plan = self.scheduler.schedule()
        planned = self.clock.now()
        stand = self._blocks()
        passes = alike(plan)
        for works in passes:
            self._run(works)
        outputs = self._collect()
        if plan:
            self.steps.append(StepRecord(
                number=self._steps, start=start, end=self.clock.now(),
                scheduling=planned - start,
                ran=tuple(Ran(work.job.id, work.phase, work.count) for work in plan),
                forwards=len(passes), drawn=sum(len(output.tokens) for output in outputs),
                waiting=len(self.scheduler.waiting),
                preempted=tuple(job.id for job in self.scheduler.preempted), **stand,
            ))  # fmt: skip
            self._steps += 1
        return outputs

    def run(self) -> Iterator[Output]:
        """Outputs of step after step, until all have ended. Others may be added in between."""
        while self.busy:
            yield from self.step()

    def _run(self, works: list[Work]) -> None:
        """One forward pass, and what it gives to each of its rows."""
        try:
            logits = self._forward(works)
        except Exception as error:
            for work in works:
                self.scheduler.end(work.job, "error", error)
            return
        for work, own in zip(works, logits, strict=True):
            try:
                drawn = self._draw(work, own)
            except Exception as error:
                self.scheduler.end(work.job, "error", error)
            else:
                self.scheduler.record(work, drawn)

    @torch.inference_mode()
    def _forward(self, works: list[Work]) -> Tensor:
        """Logits (B, T, V) of rows with as many new tokens each; (B, 1, V) without drafts."""
        sequences = [work.job.sequence for work in works]
        tokens = torch.tensor([work.tokens for work in works], device=self.model.device)
        try:
            self.cache.bind(sequences, lengths=[sequence.written for sequence in sequences])
            logits = self.model(tokens, self.cache, last_only=not works[0].drafts)
        finally:
            self.cache.reset()  # nothing stays bound, whole again if the pass broke off
        self.clock.forward(tokens.numel())
        return logits

    def _draw(self, work: Work, logits: Tensor) -> list[int]:
        """The tokens that follow, from logits (T, V); none where the text is not read to its end.

        A draft stands if it is what the request draws at its place. A token that is guessed with
        certainty stands so with the probability that the model gives it, as ``accept_drafts`` has
        it; and what is drawn is the same with drafts and without.
        """
        if not work.draws:
            return []
        sampler, stops = self._samplers[work.job.id], work.job.request.stop_tokens
        generator = sampler.generator
        assert isinstance(generator, torch.Generator)
        before, drawn = generator.get_state(), list[int]()
        try:
            for row, guess in zip(logits[-1 - len(work.drafts) :], [*work.drafts, -1], strict=True):
                token = int(choose(sampler, row[None, None]))
                drawn.append(token)
                if token != guess or token in stops:
                    break
        except BaseException:
            generator.set_state(before)  # nobody has seen these draws: they come again
            raise
        return drawn

    def _collect(self) -> list[Output]:
        """What was not handed out yet, and who has ended."""
        outputs = []
        for job in self.scheduler.running:
            tokens = tuple(job.drawn[job.handed_out :])
            if tokens:
                job.handed_out = len(job.drawn)
                outputs.append(Output(job.id, tokens))
        ended, self.scheduler.ended = self.scheduler.ended, []
        for job, record, error in ended:
            tokens = tuple(job.drawn[job.handed_out :])
            outputs.append(Output(job.id, tokens, record.reason, error, record))
            self.requests.append(record)
            del self._samplers[job.id]
        return outputs

    def _propose(self, tokens: Sequence[int], k: int) -> list[int]:
        """At most k tokens that followed earlier in the text."""
        lookup = PromptLookup(self.model.config.vocab_size)
        lookup.extend(tokens)
        return lookup.propose(k, greedy).tokens

    def _blocks(self) -> dict[str, int]:
        """How rows and blocks stand now. Only last blocks have slots that wait for a token."""
        pool, running = self.pool, self.scheduler.running
        size = pool.block_size
        return {
            "running": len(running),
            "blocks_used": pool.in_use,
            "blocks_free": pool.free,
            "blocks_evictable": pool.evictable,
            "slots_used": pool.in_use * size,
            "slots_empty": sum(
                len(job.sequence.blocks) * size - len(job.sequence.tokens) for job in running
            ),
        }


def alike(plan: Sequence[Work]) -> list[list[Work]]:
    """The plan in parts with equal numbers of tokens, so that no row of a pass is padded."""
    parts: dict[tuple[int, bool], list[Work]] = {}
    for work in plan:
        parts.setdefault((work.count, bool(work.drafts)), []).append(work)
    return list(parts.values())
