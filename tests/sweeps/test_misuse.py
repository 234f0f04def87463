"""Every argument of every public call, given everything that is wrong for it, one at a time.

Each call works as documented, or raises ``ValueError`` or ``TypeError`` with words that show the
value, before anything has changed. A table is read by people: ``taken.txt`` lists which odd
values a call takes, and is right to, or refuses in words that show another value than this one.
What is not in it is a failure.
"""

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

import kvbook
from kvbook import accounting, cli, config, measure
from sweeps.good_measures import GOOD
from sweeps.wrong_values import fault_of, names_of, run, wrong_values

HERE = Path(__file__).parent

# Public, but called by kvbook's own parts only, with what those parts have checked.
BETWEEN_PARTS = {
    kvbook.Placement, kvbook.Contiguous, kvbook.Ring, kvbook.Paged, kvbook.BoundPaged,
    kvbook.Store, kvbook.DenseStore, kvbook.SlotMajorStore, kvbook.CodedStore,
    kvbook.CacheGroup, kvbook.TailedGroup, kvbook.DirectGroup,
    kvbook.ModelDraft, kvbook.PromptLookup, kvbook.Draft,
}  # fmt: skip
ELSEWHERE = {"kvbook.errors", "kvbook.measure.clock.Clock"}  # these need no call at all
NOT_TRIED = {
    ("probe", "stream_bytes", "None"),  # right, and measures the memory for seconds
    ("main", "arguments", "None"),  # right, and reads the arguments that this test was started with
}
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
    "load_gallery": "no argument", "empty_layer": "no argument", "Format.describe": "no argument",
    "Layer.with_keys_as_values": "no argument", "PoolLayout": "made by pool_layout",
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


TAKEN = table("taken.txt")
LABELS = list(wrong_values())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes "text" for a path writes here."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", GOOD)
def test_a_wrong_argument_is_refused_by_name(call: str) -> None:
    faults = []
    for argument in GOOD[call]().arguments:
        taken = TAKEN.get((call, argument), set())
        for label in LABELS:
            if (call, argument, label) in NOT_TRIED:
                continue
            fault = fault_of(GOOD[call], argument, label)
            own_words = fault is not None and "does not quote" in fault
            if fault is not None and not (label in taken and (fault == "" or own_words)):
                faults.append(f"{argument} = {label}: {fault or 'taken without a word'}")
    assert not faults, "\n".join(faults)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("call", GOOD)
def test_the_right_call_works(call: str) -> None:
    """Else every wrong value would be refused for another reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(GOOD[call]())


def test_the_table_names_calls_arguments_and_values_that_exist() -> None:
    for call, argument in TAKEN:
        assert argument in GOOD[call]().arguments, (call, argument)
    for labels in TAKEN.values():
        assert labels <= set(LABELS), labels - set(LABELS)


def public() -> dict[str, Any]:
    """Functions, classes and their own public methods: name -> the thing itself."""
    found: dict[str, Any] = {}
    for room in (kvbook, measure, accounting, config, cli):
        for name in getattr(room, "__all__", ["main"]):
            thing = getattr(room, name)
            home = f"{getattr(thing, '__module__', '')}.{name}"
            if not callable(thing) or any(home.startswith(room) for room in ELSEWHERE):
                continue
            found[name] = thing
            if inspect.isclass(thing) and thing not in BETWEEN_PARTS:
                methods = {k: v for k, v in vars(thing).items() if not k.startswith("_")}
                called = inspect.isfunction, lambda v: isinstance(v, classmethod)
                found |= {
                    f"{name}.{k}": v for k, v in methods.items() if any(is_(v) for is_ in called)
                }
    return found


RESULTS = (
    measure.ByteCount, measure.CountedFlops, measure.GenerationTiming, measure.Record,
    measure.StepTiming, measure.Timing, measure.HostClock, measure.EventClock, accounting.Bound,
    accounting.CardBudget, accounting.Flops, accounting.GalleryModel, accounting.Traffic,
)  # fmt: skip


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
