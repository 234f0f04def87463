"""Records of machines: a folder of files, each checked, each a panel of the roofline figure."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest

from kvbook import measure, plots
from kvbook.accounting import Hardware
from kvbook.measure import Record, TooFastError, load_record, load_records, save_record
from kvbook.measure.record import SHIPPED
from kvbook.measure.steps import StepTiming

CHAPTER = Path(__file__).parents[2] / "book" / "06-memory-wall.ipynb"

# Written by hand, in the form in which the command writes; no such device was measured.
CUDA: dict[str, Any] = {
    "format": 1,
    "hardware": {
        "name": "Invented GPU",
        "peak_flops": {"float32": 5e13, "bfloat16": 8e14},
        "bandwidth": 4e12,
        "memory": 150_000_000_000,
        "source": "measured with kvbook.measure.probe",
        "provenance": {
            "device": "Invented GPU", "device_type": "cuda", "threads": 16, "torch": "2.13.0",
            "clock": "device events", "date": "2026-01-31",
        },
    },
    "model": "SmolLM2-135M, random weights",
    "steps": [
        {
            "T": 512, "S": 0, "batch": 8, "dtype": "bfloat16", "flops": 942_802_993_152,
            "moved_bytes": 462_492_288, "seconds": 0.004, "quartiles": [0.0039, 0.0041],
        },
        {
            "T": 1, "S": 512, "batch": 1, "dtype": "float32", "flops": 304_418_304,
            "moved_bytes": 561_747_456, "seconds": 0.003, "quartiles": [0.003, 0.003],
        },
    ],
}  # fmt: skip


def write(folder: Path, name: str, content: Any = CUDA) -> Path:
    file = folder / name
    file.write_text(json.dumps(content))
    return file


# ---- What ships


def test_what_ships_is_one_record_of_a_cpu_and_says_so() -> None:
    records = load_records()
    assert records
    for name, record in records.items():
        assert name.startswith(record.hardware.provenance["device_type"])
        assert record.steps
        assert re.fullmatch(r".+ \(.+\), \d{4}-\d\d-\d\d", record.title)


def test_a_shipped_record_names_no_host_and_no_path() -> None:
    for file in SHIPPED.glob("*.json"):
        assert not re.search(r"/\w+/|host(?! clock)|user", file.read_text(), re.IGNORECASE)


def test_no_shipped_step_is_faster_than_its_machine() -> None:
    for record in load_records().values():
        for step in record.steps:
            bound = record.hardware.bound(step.flops, step.moved_bytes, step.dtype)
            assert step.seconds > bound.seconds


# ---- A folder of records


def test_records_come_by_name_in_order(tmp_path: Path) -> None:
    for name in ("cuda-b.json", "cpu-a.json", "cuda-a.json", "notes.txt"):
        write(tmp_path, name)
    assert list(load_records(tmp_path)) == ["cpu-a", "cuda-a", "cuda-b"]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no records; write one there with"):
        load_records(tmp_path)


def test_one_bad_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, "good.json")
    write(tmp_path, "bad.json", {"format": 1})
    with pytest.raises(ValueError, match=r"bad\.json is no record of a machine"):
        load_records(tmp_path)


def test_a_title_names_machine_kind_and_date(tmp_path: Path) -> None:
    assert load_record(write(tmp_path, "a.json")).title == "Invented GPU (cuda), 2026-01-31"


@pytest.mark.parametrize(("threads", "words"), [(1, "1 thread"), (2, "2 threads")])
def test_the_title_of_a_cpu_counts_threads(threads: int, words: str) -> None:
    facts = {**CUDA["hardware"]["provenance"], "device_type": "cpu", "threads": threads}
    cpu = Hardware("A CPU", {"float32": 1.0}, 1.0, None, "", facts)
    assert Record(cpu, "", ()).title == f"A CPU (CPU, {words}), 2026-01-31"


@pytest.mark.parametrize(
    ("step", "label"),
    [
        ((512, 0, 1), "prefill of 512"),
        ((64, 0, 4), "prefill of 64, batch 4"),
        ((1, 2048, 1), "decode after 2,048"),
        ((1, 512, 8), "decode after 512, batch 8"),
        ((16, 512, 1), "prefill of 16 after 512"),
        ((1, 0, 1), "prefill of 1"),
    ],
)
def test_a_step_in_words(step: tuple[int, int, int], label: str) -> None:
    assert StepTiming(*step, "float32", 1, 1, 1.0, (1.0, 1.0)).label == label


def in_step(name: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["steps"][0].update({name: value})


def without(fact: str) -> Callable[[Any], None]:
    return lambda content: content["hardware"]["provenance"].pop(fact)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (in_step("T", 0), "T must be at least 1, got 0"),
        (in_step("S", -1), "S must be at least 0, got -1"),
        (in_step("batch", "8"), "batch must be a whole number at least 1, got '8'"),
        (in_step("flops", 1e9), "flops must be a whole number"),
        (in_step("moved_bytes", 0), "moved_bytes must be at least 1"),
        (in_step("seconds", 0), "seconds must be finite and above 0, got 0"),
        (in_step("seconds", float("nan")), "seconds must be finite and above 0, got nan"),
        (in_step("seconds", float("inf")), "seconds must be finite and above 0, got inf"),
        (in_step("quartiles", [1.0]), r"quartiles must be two numbers, got \(1.0,\)"),
        (in_step("quartiles", [0.1, -1.0]), "seconds must be finite and above 0, got -1.0"),
        (in_step("quartiles", [0.0041, 0.0043]), "the median must lie between the quartiles"),
        (in_step("quartiles", [0.0031, 0.0039]), "the median must lie between the quartiles"),
        (in_step("dtype", "bf16"), "write 'bfloat16' for 'bf16'"),
        (in_step("dtype", "float31"), "unknown dtype 'float31'"),
        (in_step("speed", 1), "unexpected keyword argument 'speed'"),
        (lambda content: content["steps"][0].pop("batch"), "batch"),
        (without("date"), "its provenance lacks date"),
        (without("threads"), "its provenance lacks threads"),
        (lambda content: content["hardware"].update(bandwidth=0), "bandwidth must be above 0"),
        (lambda content: content["hardware"].update(provenance=[]), "provenance must be a table"),
    ],
)
def test_a_record_that_cannot_be_right_is_refused(
    tmp_path: Path, spoil: Callable[[Any], None], message: str
) -> None:
    content = json.loads(json.dumps(CUDA))
    spoil(content)
    file = write(tmp_path, "spoiled.json", content)
    with pytest.raises(ValueError, match=rf"(?s)spoiled\.json is no record.*{message}"):
        load_record(file)


# ---- No step is faster than its machine: 4 TB/s, 50 TFLOP/s in float32, 800 in bfloat16


def step(**changes: Any) -> StepTiming:
    fields = {**CUDA["steps"][1], **changes}
    return StepTiming(**{**fields, "quartiles": (fields["seconds"],) * 2})


TOO_FAST = [
    # 4 GB in 0.9 ms are 4.4 TB/s.
    (step(moved_bytes=4_000_000_000, seconds=0.0009), "bandwidth|memory", "900 µs", "1 ms"),
    # 10^11 operations in 1 ms are 100 TFLOP/s.
    (step(flops=100_000_000_000, seconds=0.001), "compute", "1 ms", "2 ms"),
    # A dtype without a peak has the bandwidth all the same.
    (step(dtype="float16", moved_bytes=4_000_000_000, seconds=0.0009), "bandwidth", "900 µs",
     "1 ms"),
]  # fmt: skip


@pytest.mark.parametrize(("fast", "limit", "took", "least"), TOO_FAST)
def test_a_step_that_beats_its_machine_is_neither_written_nor_read(
    tmp_path: Path, fast: StepTiming, limit: str, took: str, least: str
) -> None:
    record = load_record(write(tmp_path, "good.json"))
    file = tmp_path / "new.json"
    said = rf"'decode after 512' took {took}, but by .*({limit}).* at least {least}; measure both"
    with pytest.raises(TooFastError, match=said):
        save_record(file, record.hardware, record.model, [*record.steps, fast])
    assert not file.exists()
    content = {**CUDA, "steps": [CUDA["steps"][0], asdict(fast)]}
    with pytest.raises(ValueError, match=rf"edited\.json is no record .*{said}"):
        load_record(write(tmp_path, "edited.json", content))


def test_a_step_at_exactly_the_peak_is_possible(tmp_path: Path) -> None:
    record = load_record(write(tmp_path, "good.json"))
    fastest = step(moved_bytes=4_000_000_000, seconds=0.001)
    save_record(tmp_path / "new.json", record.hardware, "a model", [fastest])
    assert load_record(tmp_path / "new.json").steps == (fastest,)


@pytest.mark.parametrize(
    "fields",
    [
        {"moved_bytes": 4_000_000_000, "flops": 1},  # 1 ms at 4 TB/s
        {"moved_bytes": 1, "flops": 50_000_000_000},  # 1 ms at 50 TFLOP/s
        {"moved_bytes": 4_000_000_000, "flops": 1, "dtype": "float16"},
    ],
)
def test_a_step_may_seem_faster_by_a_twentieth_and_no_more(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    record = load_record(write(tmp_path, "good.json"))
    near, beyond = step(seconds=0.000951, **fields), step(seconds=0.000949, **fields)
    save_record(tmp_path / "new.json", record.hardware, "a model", [near])
    assert load_record(tmp_path / "new.json").steps == (near,)
    with pytest.raises(TooFastError, match=r"took 949 µs, but by .* at least 1 ms"):
        save_record(tmp_path / "new.json", record.hardware, "a model", [near, beyond])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": float("nan")}, "seconds must be finite and above 0, got nan"),
        ({"seconds": True}, "seconds must be finite and above 0, got True"),
        ({"T": 0}, "T must be at least 1, got 0"),
        ({"dtype": "bf16"}, "write 'bfloat16' for 'bf16'"),
    ],
)
def test_what_cannot_be_read_back_is_not_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    record = load_record(write(tmp_path, "good.json"))
    old = write(tmp_path, "old.json")
    before = old.read_bytes()
    with pytest.raises(ValueError, match=message):
        save_record(old, record.hardware, record.model, [step(**changes)])
    assert old.read_bytes() == before


def test_a_machine_without_its_facts_is_not_written(tmp_path: Path) -> None:
    bare = Hardware("x", {"float32": 1.0}, 1.0, None, "")
    with pytest.raises(ValueError, match="its provenance lacks device, device_type, threads"):
        save_record(tmp_path / "new.json", bare)
    assert not (tmp_path / "new.json").exists()


# ---- The figure


def test_a_roofline_meets_at_the_ridge() -> None:
    machine = Hardware("x", {"float32": 2e12, "bfloat16": 8e12}, 1e11, None, "")
    figure, ax = plt.subplots()
    plots.roofline(ax, machine, {"float32": plots.BLUE, "bfloat16": plots.VERMILION}, 1, 1000)
    lines = [[tuple(point) for point in line.get_xydata()] for line in ax.lines]
    assert lines == [
        [(20, 2e12), (1000, 2e12)], [(80, 8e12), (1000, 8e12)], [(1, 1e11), (80, 8e12)],
    ]  # fmt: skip
    assert [text.get_text() for text in ax.texts] == [
        "float32, 2,000 GFLOP/s", "bfloat16, 8,000 GFLOP/s", "memory\n100 GB/s",
    ]  # fmt: skip
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "FLOPs/B" in ax.get_xlabel()
    assert "FLOP/s" in ax.get_ylabel()
    plt.close(figure)


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (10.0, 10.0, "low must be below high"), (10.0, 1.0, "low must be below high"),
        (0.0, 1.0, "low must be above 0"), (float("nan"), 1.0, "low must be above 0"),
        (1.0, float("inf"), "high must be above 0 and below"), (1.0, "9", "high must be above 0"),
    ],
)  # fmt: skip
def test_a_roofline_needs_two_ends(low: float, high: float, message: str) -> None:
    machine = Hardware("x", {"float32": 2e12}, 1e11, None, "")
    figure, ax = plt.subplots()
    with pytest.raises(ValueError, match=message):
        plots.roofline(ax, machine, {"float32": plots.BLUE}, low, high)
    assert not ax.lines
    plt.close(figure)


def test_a_roofline_needs_a_peak_and_a_dtype() -> None:
    machine = Hardware("x", {"float32": 2e12}, 1e11, None, "")
    figure, ax = plt.subplots()
    with pytest.raises(ValueError, match="x has no peak for bfloat16"):
        plots.roofline(ax, machine, {"bfloat16": plots.BLUE})
    with pytest.raises(ValueError, match="name at least one dtype"):
        plots.roofline(ax, machine, {})
    assert not ax.lines
    plt.close(figure)


def test_a_new_record_is_one_more_panel_of_the_chapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell of chapter 6 as it stands, over a folder with one more file."""
    for file in SHIPPED.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write(tmp_path, "cuda-invented.json")
    shipped = load_records()
    here = next(iter(shipped.values()))
    matplotlib.use("agg")
    monkeypatch.setattr(plt, "show", lambda: None)
    cells = nbformat.read(CHAPTER, 4).cells
    figure_cell = next(cell.source for cell in cells if cell.id == "roofline")
    names = {
        "plt": plt, "plots": plots, "here": here, "toy_steps": here.steps[:1],
        "load_records": lambda: measure.load_records(tmp_path),
    }  # fmt: skip
    exec(figure_cell, names)
    figure = plt.gcf()
    titles = [ax.get_title(loc) for ax in figure.axes for loc in ("left", "center")]
    assert [t for t in titles if t] == [
        f"this machine: {here.title}",
        *(f"record: {record.title}" for record in shipped.values()),
        "record: Invented GPU (cuda), 2026-01-31",
    ]  # fmt: skip
    panel = figure.axes[-1]
    points = [line.get_xydata()[0] for line in panel.lines if line.get_marker() == "o"]
    assert [tuple(point) for point in points] == [
        (942_802_993_152 / 462_492_288, 942_802_993_152 / 0.004),
        (304_418_304 / 561_747_456, 304_418_304 / 0.003),
    ]
    assert "memory\n4,000 GB/s" in [text.get_text() for text in panel.texts]
    plt.close(figure)


def test_a_record_saved_is_a_record_loaded(tmp_path: Path) -> None:
    record = load_record(write(tmp_path, "a.json"))
    save_record(tmp_path / "b.json", record.hardware, record.model, record.steps)
    assert load_record(tmp_path / "b.json") == record
