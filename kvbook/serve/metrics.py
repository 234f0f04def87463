"""What an engine does, in the text format that Prometheus reads.

Knows: counts of an engine, names and units. Does not know: who asks.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Mapping

from kvbook.serve.engine import Engine
from kvbook.serve.totals import Totals


def prometheus(engine: Engine, totals: Totals) -> str:
    """All metrics, each with its type and what it means."""
    pool, scheduler, stats = engine.pool, engine.scheduler, engine.prefix.stats
    blocks = {"used": pool.in_use, "free": pool.free, "evictable": pool.evictable}
    requests = {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
    return "".join([
        _metric("blocks", "gauge", "Blocks of the pool by state.", "state", blocks),
        _metric("requests", "gauge", "Requests under way by state.", "state", requests),
        _metric("requests_ended_total", "counter", "Requests by why they ended.", "reason",
                totals.requests),
        _number("prompt_tokens_total", "Tokens of prompts that have begun.", stats.prompt_tokens),
        _number("cached_tokens_total", "Of these, found in the cache.", stats.cached_tokens),
        _number("new_tokens_total", "Tokens drawn by requests that ended.", totals.new_tokens),
        _number("computed_tokens_total", "Tokens computed for them.", totals.computed_tokens),
        _number("preemptions_total", "Times that one of them gave way.", totals.preemptions),
        _number("drafted_tokens_total", "Tokens guessed for them.", totals.drafted_tokens),
        _number("accepted_tokens_total", "Of these, accepted.", totals.accepted_tokens),
    ])  # fmt: skip


def _metric(name: str, kind: str, help: str, label: str, values: Mapping[str, int]) -> str:
    lines = [f'kvbook_{name}{{{label}="{key}"}} {value}\n' for key, value in values.items()]
    return f"# HELP kvbook_{name} {help}\n# TYPE kvbook_{name} {kind}\n" + "".join(lines)


def _number(name: str, help: str, value: int) -> str:
    return f"# HELP kvbook_{name} {help}\n# TYPE kvbook_{name} counter\nkvbook_{name} {value}\n"
