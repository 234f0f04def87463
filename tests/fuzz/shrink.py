"""A failing case with as few operations and as plain a model as still fail."""

import time
from collections.abc import Iterator
from dataclasses import replace

from fuzz.case import Case, Op
from fuzz.models import FAMILIES
from fuzz.play import Failure, failure_of

SECONDS = 30.0
# What a failure may do without, one after the other.
PLAIN = {
    "rope_scaling": None, "qkv_bias": False, "qk_norm": False, "sinks": 0, "window": None,
    "latent": None, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_positions": 64,
}  # fmt: skip


def shrunk(failure: Failure, seconds: float = SECONDS) -> Failure:
    """Smaller while it still fails with the same class of error."""
    until, best = time.monotonic() + seconds, failure
    while time.monotonic() < until:
        for case in smaller(best.case):
            found = failure_of_any(case)
            if found is not None and type(found.error) is type(failure.error):
                best = found
                break
            if time.monotonic() > until:
                return best
        else:
            return best
    return best


def failure_of_any(case: Case) -> Failure | None:
    try:
        return failure_of(case)
    except ValueError:  # there is no such model, or no such cache for it
        return None


def smaller(case: Case) -> Iterator[Case]:
    """Without many operations, without few, with less in each; then with a plainer model."""
    ops = case.ops
    size = len(ops) // 2
    while size:
        for start in range(0, len(ops), size):
            yield case.with_ops(ops[:start] + ops[start + size :])
        size //= 2
    for i, op in enumerate(ops):
        for less in with_less(op):
            yield case.with_ops([*ops[:i], less, *ops[i + 1 :]])
    if case.family == FAMILIES[0]:
        for name, value in PLAIN.items():
            if name in case.config and case.config[name] != value:
                yield replace(case, config={**case.config, name: value})
    if case.sizes["rows"] > 1:
        yield replace(case, sizes={**case.sizes, "rows": case.sizes["rows"] - 1})


def with_less(op: Op) -> Iterator[Op]:
    """Each number in its place by half, each list shorter."""
    for name, value in op.given.items():
        if isinstance(value, list) and value:
            if len(value) > 1:
                yield Op(op.name, {**op.given, name: value[:-1]})
            for i, n in enumerate(value):
                if type(n) is int and n > 0:
                    yield Op(op.name, {**op.given, name: [*value[:i], n // 2, *value[i + 1 :]]})
        if type(value) is int and value > 1 and name != "seed":
            yield Op(op.name, {**op.given, name: value // 2})
