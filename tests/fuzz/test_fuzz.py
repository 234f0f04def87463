"""A short run with a fixed seed, and that the fuzz notices, shrinks and prints what is wrong."""

from typing import Any

import pytest

from fuzz import command
from fuzz.kinds import KINDS
from fuzz.play import OPERATIONS, draw_case, failure_of, fuzz_one
from fuzz.shrink import shrunk
from fuzz.tally import Tally
from fuzz.watch import Difference
from kvbook.cache import BlockPool, DenseStore, Ring

pytestmark = pytest.mark.usefixtures("one_thread")
EACH = 15  # operations of one kind of cache: a case has thirty in the long runs


def test_every_kind_of_cache_through_every_operation() -> None:
    tally = Tally()
    for seed, kind in enumerate(KINDS):
        failure = fuzz_one(draw_case(seed, kind), seed, EACH, tally)
        assert failure is None, f"{failure.case}\n{failure.difference}"
    assert tally.missing(OPERATIONS) == []
    assert tally.operations.total() == EACH * len(KINDS)
    assert min(tally.refused.total(), tally.library, tally.recomputed) > 10


def test_a_case_is_drawn_from_its_seed_alone() -> None:
    kind = ("ring, 2 back", "int4")
    assert draw_case(3, kind) == draw_case(3, kind) != draw_case(4, kind)


def first_failure(kind: tuple[str, str]) -> Any:
    for seed in range(20):
        failure = fuzz_one(draw_case(seed, kind), seed, 30, Tally())
        if failure is not None:
            return failure
    raise AssertionError("the fault was not noticed in 600 operations")


def nothing(*inputs: Any, **named: Any) -> None:
    """Instead of a method that is left out."""


@pytest.mark.parametrize(
    ("kind", "owner", "method"),
    [
        (("contiguous", "dense"), DenseStore, "fill"),
        (("ring, 1 back", "dense"), Ring, "truncate"),
        (("paged", "dense"), BlockPool, "release"),
    ],
)
def test_what_is_left_out_is_noticed_and_the_printed_test_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    kind: tuple[str, str], owner: type, method: str,
) -> None:
    monkeypatch.setattr(owner, method, nothing)
    failure = first_failure(kind)
    small = shrunk(failure, seconds=5.0)
    assert len(small.case.ops) <= len(failure.case.ops)
    command.report(failure, small, 0, Tally())
    printed = capsys.readouterr().out
    assert small.difference in printed
    names: dict[str, Any] = {}
    start, stop = printed.index("from fuzz.case"), printed.index(command.END)
    exec(printed[start:stop], names)
    with pytest.raises((Difference, ValueError)):
        names["test_found_by_the_fuzz"]()
    monkeypatch.undo()
    names["test_found_by_the_fuzz"]()
    assert failure_of(failure.case) is None
