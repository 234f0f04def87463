"""Every argument of every public call, given everything that is wrong for it, one at a time.

Each call works as documented, or raises ``ValueError`` or ``TypeError`` with words that show the
value, before anything has changed. Two tables are read by people: ``taken.txt`` lists which odd
values a call takes, and is right to, or refuses in words that show another value than this one;
``open.txt`` lists faults that are known and not mended yet.
What is in neither is a failure. ``KVBOOK_LONG_TESTS=1`` tries the open ones as well, and fails
where one of them has been mended but not struck from the list.
"""

import inspect
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

import kvbook
from kvbook import measure
from sweeps.good_drafts import GOOD as WITH_DRAFTS
from sweeps.good_measures import GOOD
from sweeps.wrong_values import fault_of, names_of, run, wrong_values

LONG = bool(os.environ.get("KVBOOK_LONG_TESTS"))
HERE = Path(__file__).parent

# Public, but called by kvbook's own parts only, with what those parts have checked.
BETWEEN_PARTS = {
    kvbook.Placement, kvbook.Contiguous, kvbook.Ring, kvbook.Paged, kvbook.BoundPaged,
    kvbook.Store, kvbook.DenseStore, kvbook.SlotMajorStore, kvbook.CodedStore,
    kvbook.CacheGroup, kvbook.TailedGroup, kvbook.DirectGroup,
    kvbook.ModelDraft, kvbook.PromptLookup, kvbook.Draft,
}  # fmt: skip
# Sizes and records have sweeps of their own in tests/accounting; these need no call at all.
ELSEWHERE = {
    "kvbook.accounting", "kvbook.config", "kvbook.errors", "kvbook.measure.clock.Clock",
}  # fmt: skip
SLOW = {("probe", "stream_bytes", "None")}  # right, and measures the memory for seconds
WITHOUT_A_CALL = {
    "CodedStore": "made by quantized()",
    "DirectGroup": "a shortcut of CacheGroup, with the same arguments",
    "Store": "a base class", "Placement": "a base class",
    "absorbed": "called by a latent layer", "materialized": "called by a latent layer",
    "flush_cache": "one argument, as in last_level_cache; takes memory",
    "PrefixCache.clear": "no argument", "PrefixCache.keyed": "called by PrefixCache",
    "PrefixCache.confirms": "called by PrefixCache", "KVCache.reset": "no argument",
    "BlockPool.check_unclaimed": "no argument", "BlockPool.claim": "no argument",
    "KVView.read": "no argument", "KVView": "made by a cache",
    "Acceptance": "made by accept_drafts", "Speculation": "made by speculate",
    "Draft": "a protocol", "Proposal": "made by a draft",
}  # fmt: skip


def table(file: str) -> dict[tuple[str, str], set[str]]:
    """Lines ``call | argument | label, label`` as a set of labels for each argument."""
    found: dict[tuple[str, str], set[str]] = {}
    for line in (HERE / file).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            call, argument, labels = line.split(" | ")
            found[call, argument] = set(labels.split(", "))
    return found


assert WITH_DRAFTS is GOOD
TAKEN, OPEN = table("taken.txt"), table("open.txt")
LABELS = list(wrong_values())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes "text" for a path writes here."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", GOOD)
def test_a_wrong_argument_is_refused_by_name(call: str) -> None:
    faults, mended = [], []
    for argument in GOOD[call]().arguments:
        taken = TAKEN.get((call, argument), set())
        known = OPEN.get((call, argument), set())
        for label in LABELS if LONG else [label for label in LABELS if label not in known]:
            if (call, argument, label) in SLOW:
                continue
            fault = fault_of(GOOD[call], argument, label)
            own_words = fault is not None and "does not quote" in fault
            right = fault is None or (label in taken and (fault == "" or own_words))
            if label in known:
                mended += [f"{argument} = {label}"] if right else []
            elif not right:
                faults.append(f"{argument} = {label}: {fault or 'taken without a word'}")
    assert not faults, "\n".join(faults)
    assert not mended, "mended; strike from open.txt: " + ", ".join(mended)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("call", GOOD)
def test_the_right_call_works(call: str) -> None:
    """Else every wrong value would be refused for another reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(GOOD[call]())


def test_the_tables_name_calls_arguments_and_values_that_exist() -> None:
    for call, argument in [*TAKEN, *OPEN]:
        assert argument in GOOD[call]().arguments, (call, argument)
    for labels in [*TAKEN.values(), *OPEN.values()]:
        assert labels <= set(LABELS), labels - set(LABELS)
    assert not {(key, label) for key in TAKEN.keys() & OPEN for label in TAKEN[key] & OPEN[key]}


def public() -> dict[str, Any]:
    """Functions, classes and their own public methods: name -> the thing itself."""
    found: dict[str, Any] = {}
    for room in (kvbook, measure):
        for name in room.__all__:
            thing = getattr(room, name)
            home = f"{getattr(thing, '__module__', '')}.{name}"
            if not callable(thing) or any(home.startswith(room) for room in ELSEWHERE):
                continue
            found[name] = thing
            if inspect.isclass(thing) and thing not in BETWEEN_PARTS:
                methods = {k: v for k, v in vars(thing).items() if not k.startswith("_")}
                found |= {f"{name}.{k}": v for k, v in methods.items() if inspect.isfunction(v)}
    return found


RESULTS = (measure.ByteCount, measure.CountedFlops, measure.GenerationTiming, measure.Record,
           measure.StepTiming, measure.Timing, measure.HostClock, measure.EventClock)  # fmt: skip


def test_every_public_call_is_swept() -> None:
    swept = {name.split(" (")[0] for name in GOOD} | WITHOUT_A_CALL.keys()
    results = {kind.__name__ for kind in RESULTS}
    missing = {
        name for name, thing in public().items()
        if name not in swept and name.split(".")[0] not in results
        and not (inspect.isclass(thing) and issubclass(thing, Exception))
    }  # fmt: skip
    assert not missing, "add a right call to good_calls.py, or say why there is none"


@pytest.mark.parametrize("call", GOOD)
def test_every_parameter_of_a_call_is_swept(call: str) -> None:
    made = GOOD[call]()
    left_out = set(names_of(made.function)) - set(made.arguments)
    others = {"toy_model fields": {"seed", "dtype"}}.get(call, set())
    assert left_out <= {"digest", "identity"} | others, left_out
