"""What a machine is, what it can do, and the file that keeps both."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from oracles.fake_device import FakeDevice

from kvbook.accounting import Hardware
from kvbook.config import ModelConfig
from kvbook.errors import CacheFullError
from kvbook.measure import (
    HostClock,
    StepTiming,
    __main__,
    filled_cache,
    load_record,
    measure_step,
    peaks,
    probe,
    provenance,
    save_record,
)
from kvbook.measure.machine import cpu_last_level
from kvbook.model.toy import toy_model


def ticking() -> HostClock:
    """Every region lasts one second."""
    ticks = count()
    return HostClock(now=lambda: float(next(ticks)))


# ---- The machine


def test_the_last_level_is_the_largest_cache_of_data(tmp_path: Path) -> None:
    for place, (kind, size) in enumerate(
        [("Data", "32K"), ("Instruction", "999M"), ("Unified", "1024K"), ("Unified", "32M")]
    ):
        folder = tmp_path / f"index{place}"
        folder.mkdir()
        (folder / "type").write_text(kind + "\n")
        (folder / "size").write_text(size + "\n")
    assert cpu_last_level(tmp_path) == 33_554_432


def test_a_system_that_does_not_say_gives_none(tmp_path: Path) -> None:
    assert cpu_last_level(tmp_path / "absent") is None


def test_provenance_is_plain_and_complete() -> None:
    facts = provenance("cpu")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["device"]
    assert len(facts["date"]) == 10


# ---- Its peaks, by a clock that shows one second for everything


def test_peaks_are_amounts_over_times() -> None:
    found = probe("cpu", ["float32", "bf16"], clock=ticking(), stream_bytes=4000)
    rates = {"read": 4000, "copy": 8000, "update": 12000}
    assert found.provenance["bytes_per_second"] == rates
    assert found.bandwidth == 12000
    assert found.peak_flops == {"float32": 2 * 256**3, "bfloat16": 2 * 256**3}
    assert found.provenance["clock"] == "host clock"
    assert found.provenance["stream_buffer_bytes"] == 4000
    assert found.source == "measured with kvbook.measure.probe"


def test_matrices_grow_until_the_next_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "LARGEST", 1024)
    found = probe("cpu", ["float32"], clock=ticking(), stream_bytes=4, seconds_per_product=8.0)
    rates = found.provenance["flops_per_second_by_rows"]["float32"]
    assert rates == {"256": 2 * 256**3, "512": 2 * 512**3, "1024": 2 * 1024**3}
    assert found.peak_flops == {"float32": 2 * 1024**3}


def test_a_peak_is_the_best_of_the_repetitions() -> None:
    device = FakeDevice()
    costs = iter([9.0, 9.0, 9.0, 2.0, 4.0, 8.0, 1.0, 4.0, 5.0, 6.0])
    clock = device.host_clock()
    best = peaks._best(lambda: device.order(device=next(costs)), clock, torch.device("cpu"))
    assert best == 1.0


def test_a_probe_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    probe("cpu", ["float32"], clock=ticking(), stream_bytes=4)
    measure_step(toy_model(), 1, 2, clock=ticking())
    assert torch.rand(1) == expected


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ([], r"dtypes must name at least one of .*, got \[\]"),
        ("float32", "dtypes must name at least one of .*, got 'float32'"),
        (["float31"], "unknown dtype 'float31'"),
        (["int4"], "cpu does not multiply int4 matrices"),
        (["float8_e4m3"], "cpu does not multiply float8_e4m3 matrices"),
    ],
)
def test_dtypes_that_cannot_be_measured_are_refused(dtypes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probe("cpu", dtypes, clock=ticking(), stream_bytes=4)


# ---- One step of a model


def test_a_step_carries_the_formulas_and_the_time() -> None:
    model = toy_model(dtype=torch.float32)
    step = measure_step(model, 1, 10, batch=2, clock=ticking())
    assert (step.T, step.S, step.batch, step.dtype) == (1, 10, 2, "float32")
    # Two rows, two operations a weight, 18,432 + 24,576 + 2,048 weights; 11 pairs of 4 × 4 × 48.
    assert step.flops == 2 * (2 * 45_056 + 11 * 768) == 197_120
    # 4 bytes: the weights and 9 norms of 32; two rows looked up; 2 × 4 × 2 × 24 values per token,
    # 11 read and 1 written.
    assert step.moved_bytes == 4 * (45_056 + 288 + 64 + 384 * 12) == 200_064
    assert step.seconds == 1.0
    assert step.quartiles == (1.0, 1.0)
    assert step.tokens_per_second == 2
    assert step.flops_per_second == 197_120
    assert step.bytes_per_second == 200_064
    assert step.intensity == 197_120 / 200_064


def test_a_prefill_asks_for_one_row_of_logits_and_sees_the_visible_pairs_only() -> None:
    step = measure_step(toy_model(), 5, 0, clock=ticking())
    assert step.flops == 5 * 2 * (18_432 + 24_576) + 15 * 768 + 2 * 2_048


def test_every_repetition_starts_at_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model()
    lengths = []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[1].lengths))
    measure_step(model, 3, 10, batch=2, repetitions=4, clock=ticking())
    assert set(lengths) == {(10, 10)}
    assert len(lengths) == 3 + 4


def test_a_filled_cache_is_one_that_can_be_read() -> None:
    model = toy_model()
    cache = filled_cache(model, 2, 10, 12)
    assert cache.lengths == (10, 10)
    assert model(torch.tensor([[1], [2]]), cache).isfinite().all()
    assert filled_cache(model, 1, 0, 5).lengths == (0,)


@pytest.mark.parametrize(("T", "S", "batch"), [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1, 1, 1.5)])
def test_a_step_of_nothing_is_refused(T: int, S: int, batch: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        measure_step(toy_model(), T, S, batch, clock=ticking())


def test_a_step_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(CacheFullError, match="256 positions"):
        measure_step(toy_model(), 1, 256, clock=ticking())


# ---- The file

HARDWARE = Hardware(
    "made up", {"float32": 1e12}, 1e11, 2**35, "a test",
    {"device": "made up", "device_type": "cpu", "threads": 2, "torch": "2", "date": "2025-01-31"},
)  # fmt: skip
STEP = StepTiming(1, 10, 2, "float32", 197_120, 200_064, 0.5, (0.25, 0.75))


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    save_record(file, HARDWARE, "a toy", [STEP])
    record = load_record(file)
    assert record.hardware == HARDWARE
    assert record.model == "a toy"
    assert record.steps == (STEP,)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": 2}', '{"format": 1, "hardware": {}, "model": "", "steps": []}'],
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json is no record of a machine"):
        load_record(file)


def test_a_record_of_another_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    save_record(file, HARDWARE)
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="its format is 2, not 1"):
        load_record(file)


TINY = ModelConfig(
    vocab_size=32, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, d_mlp=8,
    max_positions=4096,
)  # fmt: skip


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "SMOLLM2", TINY)
    monkeypatch.setattr(__main__, "probe", lambda device, dtypes: replace(HARDWARE))


@pytest.mark.usefixtures("_quick")
def test_the_command_writes_peaks_and_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machine.json"
    arguments = ["--out", str(file), "--device", "cpu", "--step-dtypes", "float32", "bfloat16"]
    assert __main__.main([*arguments, "--batches", "1", "2", "--contexts", "4", "9"]) == 0
    steps = load_record(file).steps
    points = [(4, 0), (1, 4), (1, 9)]
    assert [(step.dtype, step.batch, step.T, step.S) for step in steps] == [
        (dtype, batch, T, S)
        for dtype in ("float32", "bfloat16") for batch in (1, 2) for T, S in points
    ]  # fmt: skip
    assert "made up: 100.0 GB/s, float32 1,000.0 GFLOP/s" in capsys.readouterr().out


@pytest.mark.usefixtures("_quick")
def test_a_machine_that_became_faster_meanwhile_is_still_faster_than_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first probe ran on a busy machine, the second on an idle one, or the other way round."""
    busy = replace(HARDWARE, bandwidth=1.0, peak_flops={"float32": 1.0})
    for order in ([busy, HARDWARE], [HARDWARE, busy]):
        monkeypatch.setattr(__main__, "probe", lambda device, dtypes, left=order: left.pop(0))
        file = tmp_path / "machine.json"
        arguments = ["--out", str(file), "--device", "cpu", "--step-dtypes", "float32"]
        assert __main__.main([*arguments, "--batches", "1", "--contexts", "4"]) == 0
        found = load_record(file).hardware
        assert (found.bandwidth, found.peak_flops) == (HARDWARE.bandwidth, HARDWARE.peak_flops)


def test_the_higher_rate_of_two_probes_is_taken_each() -> None:
    rates = {"bytes_per_second": {"read": 5.0}}
    first = replace(HARDWARE, bandwidth=2.0, peak_flops={"float32": 3.0, "bfloat16": 8.0})
    second = replace(
        HARDWARE, bandwidth=5.0, peak_flops={"float32": 4.0, "bfloat16": 7.0}, provenance=rates
    )
    found = peaks.higher_peaks(first, second)
    assert (found.bandwidth, found.peak_flops) == (5.0, {"float32": 4.0, "bfloat16": 8.0})
    assert found.provenance == {**first.provenance, "second_probe": rates}


@pytest.mark.usefixtures("_quick")
def test_the_command_can_leave_the_steps_out(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    assert __main__.main(["--out", str(file), "--device", "cpu", "--step-dtypes"]) == 0
    assert load_record(file).steps == ()


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--batches", "0"], "--batches must be at least 1, got 0"),
        (["--contexts", "4096"], "--contexts must be from 1 to 4,095, got 4,096"),
        (["--step-dtypes", "int8"], "--step-dtypes must be among float64, float32, float16"),
        (["--device", "abacus"], "--device 'abacus' cannot be used here"),
        (["--out", "no/such/folder/machine.json"], "--out must be a file in a folder that exists"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    file = tmp_path / "machine.json"
    assert __main__.main(["--out", str(file), "--device", "cpu", *extra]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not file.exists()
