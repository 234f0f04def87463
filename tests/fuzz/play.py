"""Running cases: draw operations, run them again, and what went wrong."""

import random
from dataclasses import dataclass

from oracles.cache_kinds import STORES

from fuzz.case import Case, Op
from fuzz.kinds import PLACED, fits
from fuzz.machine import Machine
from fuzz.models import build, draw_config, draw_family
from fuzz.owned import Bound
from fuzz.prefixed import Prefixed
from fuzz.rows import Rows
from fuzz.tally import Tally

OPERATIONS = sorted({*Rows.WEIGHTS, *Bound.WEIGHTS, *Prefixed.WEIGHTS})


@dataclass(frozen=True)
class Failure:
    """A case, and what went wrong at its last operation."""

    case: Case
    error: BaseException

    @property
    def difference(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def machine_of(case: Case, tally: Tally) -> Machine:
    place = PLACED[case.placed]
    if place.digest is not None:
        return Prefixed(case, tally)
    return (Bound if place.owned else Rows)(case, tally)


def draw_case(seed: int, kind: tuple[str, str]) -> Case:
    """A case without operations."""
    rnd = random.Random(f"case {seed}")
    placed, stored = kind
    place, store = PLACED[placed], STORES[stored]
    while True:
        family = draw_family(rnd, store.is_exact)
        config = draw_config(rnd, family, by_tiles=placed == "paged, read by tiles")
        case = Case(family, rnd.randrange(4), config, placed, stored, place.sizes(rnd, store.tile))
        if fits(placed, stored, build(family, config, case.seed).model.config):
            return case


def fuzz_one(case: Case, seed: int, operations: int, tally: Tally) -> Failure | None:
    """Draw and run operations, one after the other."""
    rnd = random.Random(f"operations {seed}")
    tally.kinds[case.kind] += 1
    tally.families[case.family] += 1
    machine, done = machine_of(case, tally), list[Op]()
    for _ in range(operations):
        done.append(machine.draw(rnd))
        try:
            machine.run(done[-1])
        except Exception as error:
            return Failure(case.with_ops(done), error)
    return None


def replay(case: Case) -> None:
    """Run a case again; raises what it raises. For a test that a failure was turned into."""
    machine = machine_of(case, Tally())
    for op in case.ops:
        machine.run(op)


def failure_of(case: Case) -> Failure | None:
    """Run a case again; the operations up to the one that fails."""
    machine = machine_of(case, Tally())
    for done, op in enumerate(case.ops, 1):
        try:
            machine.run(op)
        except Exception as error:
            return Failure(case.with_ops(case.ops[:done]), error)
    return None
