"""Devices that are absent and dtypes that no model computes in are refused, early and by name."""

from collections.abc import Callable

import pytest
import torch

from kvbook import compare, load_folder, load_smollm2, measure_generation, probe, toy_model
from kvbook.measure import (
    clock_for,
    flush_cache,
    last_level_cache,
    measure,
    provenance,
)
from kvbook.measure.machine import device_name, memory_of
from kvbook.model import weights
from kvbook.model.target import float_dtype, usable_device


def never() -> None:
    raise AssertionError("something ran before the device was looked at")


TAKES_A_DEVICE: dict[str, Callable[[object], object]] = {
    "load_smollm2": lambda device: load_smollm2(device=device),
    "load_folder": lambda device: load_folder("/nowhere", device=device),
    "measure": lambda device: measure(never, device=device),
    "compare": lambda device: compare({"a": never}, device=device),
    "measure_generation": lambda device: measure_generation(never, [1], device=device),
    "probe": lambda device: probe(device),
    "clock_for": clock_for,
    "flush_cache": flush_cache,
    "last_level_cache": last_level_cache,
    "memory_of": memory_of,
    "device_name": device_name,
    "provenance": provenance,
}


@pytest.mark.parametrize("name", TAKES_A_DEVICE)
@pytest.mark.parametrize("device", ["hpu", "abacus", torch.device("hpu"), "cuda:99"])
def test_a_device_that_is_absent_is_named(
    name: str, device: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An absent CUDA device fails in PyTorch with an AssertionError or a RuntimeError."""
    monkeypatch.setattr(weights, "smollm2_gguf", never)
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used here: .*cpu can alwa"):
        TAKES_A_DEVICE[name](device)


@pytest.mark.parametrize("name", TAKES_A_DEVICE)
@pytest.mark.parametrize("device", [0, True, ["cpu"]])
def test_what_is_no_device_is_quoted(name: str, device: object) -> None:
    with pytest.raises(ValueError, match=r"device must be a name such as 'cpu'.*got (0|True|\[)"):
        TAKES_A_DEVICE[name](device)


def test_a_device_that_keeps_no_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="'meta' keeps no numbers"):
        usable_device("meta")


def test_a_device_comes_back() -> None:
    assert usable_device("cpu") == usable_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn, "float32", 32, float]
)
@pytest.mark.parametrize(
    "load",
    [
        lambda dtype: load_smollm2(dtype),
        lambda dtype: load_folder("/nowhere", dtype),
        lambda dtype: toy_model(dtype=dtype),
    ],
)
def test_a_dtype_that_no_model_computes_in_is_refused(
    load: Callable[[object], object], dtype: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "smollm2_gguf", never)
    with pytest.raises(ValueError, match=r"dtype must be one of torch\.float32, .*got "):
        load(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16]
)
def test_the_four_that_models_compute_in(dtype: torch.dtype) -> None:
    assert float_dtype(dtype) == dtype
    assert toy_model(dtype=dtype).dtype == dtype


@pytest.mark.parametrize("seed", [None, True, 1.0, "0", 2**64, -(2**63) - 1])
def test_a_seed_is_an_integer_of_64_bits(seed: object) -> None:
    with pytest.raises(ValueError, match=r"seed must be an integer from .* got "):
        toy_model(seed)  # type: ignore[arg-type]


def test_a_field_that_a_config_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="depth, layers cannot be changed; fields of Model"):
        toy_model(layers=3, depth=2)
