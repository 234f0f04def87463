"""A scheduler alone: requests, blocks and time, and no model.

Knows: plans. Does not know: tensors, which token is likely.
"""

from collections.abc import Iterable, Iterator

from kvbook.cache.sizes import check_class
from kvbook.serve.records import RequestRecord
from kvbook.serve.scheduler import Scheduler
from kvbook.serve.trace import Arrival


def simulate(scheduler: Scheduler, trace: Iterable[Arrival]) -> Iterator[RequestRecord]:
    """Serve a trace, every drawn token being 0; records of the requests as they end.

    The scheduler's clock is told of one forward pass per step; give it a ``LogicalClock``.

    >>> from kvbook.cache import BlockPool, PrefixCache
    >>> from kvbook.serve.clock import LogicalClock
    >>> from kvbook.serve.trace import make_trace
    >>> scheduler = Scheduler(PrefixCache(BlockPool(64, 16), "none"), LogicalClock())
    >>> records = list(simulate(scheduler, make_trace(20, rate=0.1)))
    >>> len(records), sum(record.preemptions for record in records)
    (20, 0)
    """
    check_class("scheduler", scheduler, Scheduler, "Scheduler(prefix, LogicalClock())")
    clock, due = scheduler.clock, iter(trace)
    start, next_one = clock.now(), next(due, None)
    while next_one is not None or scheduler.jobs:
        if not scheduler.jobs and next_one is not None:
            clock.wait_until(start + next_one.time)
        while next_one is not None and start + next_one.time <= clock.now():
            scheduler.add(next_one.request)
            next_one = next(due, None)
        plan = scheduler.schedule()
        clock.forward(sum(work.count for work in plan))
        for work in plan:
            scheduler.record(work, [0] if work.draws else [])
        ended, scheduler.ended = scheduler.ended, []
        yield from (one.record for one in ended)
