"""Who runs in the next step.

Knows: requests, their order, tokens and blocks of a ``PrefixCache``. Does not know: tensors,
models, how a token is chosen.

The rules, all of them:

1. Requests are served in the order of arrival. A priority of p is a head start of p · 64 places.
2. A step computes at most ``token_budget`` tokens: one for every request that is decoding, then,
   in order, what is missing of prompts, in pieces that the budget cuts. What is left of it goes to
   drafts.
3. The first that waits begins when the pool has blocks for all its tokens, what is found shared.
   Nobody behind it begins before it, and at most ``max_rows`` run at once.
4. If a running request needs a block and there is none, the last in order gives way: its blocks
   go back, and it waits at its place until it begins again with all tokens that it has drawn.

So nobody starves. The first in order is never preempted, and computes at least one token in every
step. Without priorities, the first n requests have ended after at most as many steps as they have
tokens, prompt and new ones together. At most 9 · 64 later requests pass one, by their priority.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from kvbook.cache.prefix import CachedSequence, PrefixCache
from kvbook.cache.sizes import check_class, check_sizes
from kvbook.errors import CacheFullError, OutOfBlocksError, QueueFullError, UnknownRequestError
from kvbook.serve.clock import Clock, check_clock
from kvbook.serve.records import Phase, Reason, RequestRecord
from kvbook.serve.request import Request

HEAD_START = 64  # places in the queue that one level of priority is worth
Propose = Callable[[Sequence[int], int], Sequence[int]]  # text, k: at most k tokens to follow it


@dataclass(eq=False, slots=True)
class Job:
    """One request under way."""

    id: int
    request: Request
    arrival: float
    drawn: list[int] = field(default_factory=list)
    reason: Reason | None = None  # why it is over
    held: CachedSequence | None = None  # its sequence, while it runs
    known: int = 0  # tokens that it had when it began, or began again
    handed_out: int = 0  # of the drawn
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Smaller is served first; no two are equal."""
        return self.id - HEAD_START * self.request.priority, -self.request.priority

    @property
    def tokens(self) -> list[int]:
        """Its text: the prompt and what was drawn."""
        return [*self.request.prompt, *self.drawn]

    @property
    def sequence(self) -> CachedSequence:
        """The sequence of a request that runs."""
        assert self.held is not None
        return self.held


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does for one request: compute the next ``count`` tokens of its sequence."""

    job: Job
    count: int
    phase: Phase
    drafts: tuple[int, ...] = ()  # the last of these tokens, which are guesses

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute."""
        sequence = self.job.sequence
        return sequence.tokens[sequence.written : sequence.written + self.count].tolist()

    @property
    def draws(self) -> bool:
        """Whether they reach the end of the text, so that the next token can be chosen."""
        job, sequence = self.job, self.job.sequence
        text = len(job.request.prompt) + len(job.drawn) + len(self.drafts)
        return sequence.written + self.count == text


class Ended(NamedTuple):
    """A request that is over."""

    job: Job
    record: RequestRecord
    error: Exception | None


def no_drafts(tokens: Sequence[int], k: int) -> Sequence[int]:
    return ()


class Scheduler:
    """Plans steps over one ``prefix`` cache, by the rules that this module begins with.

    One step is ``schedule()`` and then, for each ``Work`` of the plan, ``record()`` with what was
    drawn, or ``end()``. ``ended`` collects who is over, for somebody to take. A plan of which
    something was not recorded does no harm: the next one asks for it again.

    The cost of a step does not depend on how many requests were served before.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        clock: Clock,
        token_budget: int = 256,
        max_rows: int = 32,
        max_waiting: int = 1024,
        propose: Propose = no_drafts,
    ) -> None:
        check_class("prefix", prefix, PrefixCache, "PrefixCache(pool, fingerprint)")
        check_clock(clock)
        check_sizes(token_budget=token_budget, max_rows=max_rows, max_waiting=max_waiting)
        if token_budget < max_rows:
            raise ValueError(
                f"a budget of {token_budget} tokens leaves none for some of {max_rows} rows, which "
                "would stand still; give token_budget at least max_rows"
            )
        self.prefix, self.clock, self.propose = prefix, clock, propose
        self.token_budget, self.max_rows, self.max_waiting = token_budget, max_rows, max_waiting
        self.jobs: dict[int, Job] = {}  # all that have not ended
        self.waiting: list[Job] = []  # in order
        self.running: list[Job] = []  # in order
        self.ended: list[Ended] = []
        self.preempted: list[Job] = []  # in the last step
        self._next_id = 0
        self._deadlines: list[tuple[float, int]] = []  # a heap

    def add(self, request: Request) -> Job:
        """Take a request into the queue.

        Raises ``CacheFullError`` for one that the pool can never hold, and ``QueueFullError`` if
        too many wait already; nothing has changed then.
        """
        check_class("request", request, Request, "Request(prompt, max_new_tokens)")
        pool = self.prefix.pool
        written = len(request.prompt) + request.max_new_tokens - 1  # the last is never fed
        if -(-written // pool.block_size) > pool.blocks:
            raise CacheFullError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones "
                f"write {written} tokens, but the pool holds {pool.blocks * pool.block_size} in "
                f"{pool.blocks} blocks; shorten one of them, or make a larger pool"
            )
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait already, and the limit is {self.max_waiting}; "
                "try again later, or cancel() some"
            )
        job = Job(self._next_id, request, self.clock.now())
        self._next_id += 1
        self.jobs[job.id] = job
        insort(self.waiting, job, key=_order)
        if request.deadline is not None:
            heappush(self._deadlines, (job.arrival + request.deadline, job.id))
        return job

    def schedule(self) -> list[Work]:
        """The next step: at most one ``Work`` for each running request."""
        self._give_up_the_late()
        for job in list(self.running):
            if job.reason is not None:  # an interrupt came between its last token and its end
                self.end(job, job.reason)
        self.preempted = []
        plan: list[Work] = []
        budget = self.token_budget
        decoding = [job for job in self.running if job.sequence.written >= job.known]
        for job in decoding:
            if job.held is not None and self._grow(job):  # else it has given way
                plan.append(Work(job, 1, "decode"))
                budget -= 1
        for job in self.running:
            if budget and job.sequence.written < job.known:
                plan.append(self._piece(job, budget))
                budget -= plan[-1].count
        while budget and self.waiting and len(self.running) < self.max_rows and not self.preempted:
            job = self.waiting[0]
            if not self._begin(job):
                break
            plan.append(self._piece(job, budget))
            budget -= plan[-1].count
        for place, work in enumerate(plan):
            if work.phase == "decode":
                plan[place] = self._with_drafts(work, budget)
                budget -= plan[place].count - 1
        return plan

    def record(self, work: Work, drawn: Sequence[int]) -> None:
        """The tokens of ``work`` are computed and ``drawn`` follows: nothing, if it does not draw.

        With drafts, ``drawn`` holds those that were accepted and one token more.
        """
        job, sequence, now = work.job, work.job.sequence, self.clock.now()
        accepted = max(0, len(drawn) - 1)
        written = sequence.written + work.count - len(work.drafts) + accepted
        for token in drawn:
            if token in job.request.stop_tokens:
                job.reason = "stop"
                break
            job.drawn.append(token)
            job.first_token = now if job.first_token is None else job.first_token
            job.last_token = now
            if len(job.drawn) == job.request.max_new_tokens:
                job.reason = "length"
                break
        job.computed_tokens += work.count
        job.drafted_tokens += len(work.drafts)
        job.accepted_tokens += accepted
        self.prefix.commit(sequence, written)
        if work.drafts:
            self.prefix.retract(sequence, written)
        if job.reason is not None:
            self.end(job, job.reason)

    def cancel(self, id: int) -> None:
        """End a request, wherever it stands; its blocks are free at once.

        Raises ``UnknownRequestError`` for one that has ended, or never was.
        """
        job = self.jobs.get(id) if type(id) is int else None
        if job is None:
            raise UnknownRequestError(
                f"no request {id!r:.60} is waiting or running: it has ended, or never was; "
                f"{len(self.jobs)} others are under way"
            )
        self.end(job, "cancelled")

    def end(self, job: Job, reason: Reason, error: Exception | None = None) -> None:
        """Let go of a request. Its full blocks can be found until they are needed."""
        if job.held is None:
            self.waiting.remove(job)
        else:
            self._release(job)
        del self.jobs[job.id]
        self.ended.append(Ended(job, _record_of(job, reason, self.clock.now()), error))

    def _give_up_the_late(self) -> None:
        now = self.clock.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            job = self.jobs.get(heappop(self._deadlines)[1])
            if job is not None:
                self.end(job, "deadline")

    def _begin(self, job: Job) -> bool:
        """Move the first that waits to those that run, if there are blocks for all its tokens."""
        again = job.preemptions > 0
        try:
            sequence = self.prefix.begin(job.tokens, job.request.identity, resumed=again)
        except OutOfBlocksError:
            if not self.running:
                raise  # somebody else holds blocks of this pool, and waiting would be for ever
            return False
        job.held, job.known = sequence, len(sequence.tokens)
        if not again:
            job.started, job.cached_tokens = self.clock.now(), sequence.cached_tokens
        self.waiting.remove(job)
        insort(self.running, job, key=_order)
        return True

    def _piece(self, job: Job, budget: int) -> Work:
        """What the budget allows of the tokens that it began with."""
        phase: Phase = "recompute" if job.preemptions else "prefill"
        return Work(job, min(job.sequence.new_tokens, budget), phase)

    def _grow(self, job: Job) -> bool:
        """Append what was drawn last. While there is no block for it, the last in order gives way.

        False if that was this request itself.
        """
        sequence = job.sequence
        if sequence.new_tokens:  # of a step that was not recorded, drafts among them
            self.prefix.retract(sequence, sequence.written)
        new = job.drawn[len(sequence.tokens) - len(job.request.prompt) :]
        while job.held is not None:
            try:
                self.prefix.append(sequence, new)
                return True
            except OutOfBlocksError:
                self._preempt(self.running[-1])
        return False

    def _with_drafts(self, work: Work, budget: int) -> Work:
        """The same with guesses behind it: as many as asked for, where budget and blocks allow."""
        job = work.job
        missing = job.request.max_new_tokens - len(job.drawn)  # one of them is drawn anyway
        k = min(job.request.drafts, budget, missing - 1)
        drafts = tuple(self.propose(job.tokens, k)) if k > 0 and work.draws else ()
        try:
            self.prefix.append(job.sequence, drafts)
        except OutOfBlocksError:
            return work  # nobody gives way for a guess
        return Work(job, 1 + len(drafts), "decode", drafts)

    def _preempt(self, job: Job) -> None:
        self._release(job)
        job.preemptions += 1
        self.preempted.append(job)
        insort(self.waiting, job, key=_order)

    def _release(self, job: Job) -> None:
        self.prefix.end(job.sequence)
        self.running.remove(job)
        job.held = None


def _order(job: Job) -> tuple[int, int]:
    return job.order


def _record_of(job: Job, reason: Reason, now: float) -> RequestRecord:
    return RequestRecord(
        id=job.id,
        reason=reason,
        priority=job.request.priority,
        arrival=job.arrival,
        started=job.started,
        first_token=job.first_token,
        last_token=job.last_token,
        ended=now,
        prompt_tokens=len(job.request.prompt),
        cached_tokens=job.cached_tokens,
        new_tokens=len(job.drawn),
        computed_tokens=job.computed_tokens,
        preemptions=job.preemptions,
        drafted_tokens=job.drafted_tokens,
        accepted_tokens=job.accepted_tokens,
    )
