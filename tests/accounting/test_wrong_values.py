"""Every public function with values that cannot be: exact, or an error that quotes the value."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import kvbook.accounting as accounting
from kvbook.accounting import (
    FORMATS,
    POLICIES,
    PRESETS,
    Format,
    Hardware,
    Weights,
    cache_size,
    gallery_model,
    storage_bytes,
    store_format,
)
from kvbook.accounting.gguf_fields import geometry_of_gguf
from kvbook.accounting.units import parse_share, quoted
from kvbook.config import LLAMA_3_8B

SIZE = cache_size(gallery_model("llama-3-8b").geometry, 100)
INT8 = FORMATS["int8"]
WRONG = [
    None, True, False, -1, 10**5_000, float("nan"), float("inf"), 1.5, "x", "", [], [1], {}, (),
    np.int64(5), np.float32(2), object(), b"x", Fraction(1, 3), "x" * 100_000, ...,
]  # fmt: skip

# Function and arguments that work, with the values among WRONG that each argument takes.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "cache_size": (
        cache_size,
        {"geometry": SIZE.geometry, "tokens": 5, "batch": 1, "dtype": "bf16", "block_size": 16,
         "devices": 1, "dp": 1, "cp": 1},
    ),
    "storage_bytes": (
        storage_bytes,
        {"layers": 1, "rows": 1, "heads": 1, "slots": 1, "key_width": 64, "value_width": 64,
         "keys": "bf16", "spare": 0, "tail_slots": 0, "tail": "bf16"},
    ),
    "max_tokens": (accounting.max_tokens, {"size": SIZE, "budget": 10**9, "reserved": False}),
    "max_sequences": (accounting.max_sequences, {"size": SIZE, "budget": 1, "reserved": False}),
    "card_budget": (
        accounting.card_budget,
        {"memory": 10**9, "utilization": 1, "reserve": 0, "devices": 1},
    ),
    "Weights.parse": (Weights.parse, {"text": "8B@16"}),
    "Format": (
        Format, {"name": "x", "bits": 8, "group": 32, "scale_bits": 16, "zero_bits": 0,
                 "group_tokens": 1, "shared": ""},
    ),
    "parse_format": (accounting.parse_format, {"dtype": "bf16"}),
    "store_format": (store_format, {"name": "int8", "cache": "bf16"}),
    "with_group": (INT8.with_group, {"group": 32}),
    "per_channel": (INT8.per_channel, {"tokens": 32}),
    "data_bytes": (INT8.data_bytes, {"width": 32}),
    "scale_bytes": (INT8.scale_bytes, {"width": 32, "tokens": 1}),
    "gallery_model": (gallery_model, {"name": "gpt2"}),
    "preset": (accounting.preset, {"name": "H100-SXM"}),
    "parse_bytes": (accounting.parse_bytes, {"text": "1B"}),
    "parse_count": (accounting.parse_count, {"text": "1"}),
    "parse_share": (parse_share, {"share": "0.9"}),
    "format_bytes": (accounting.format_bytes, {"size": 1}),
    "pool_layout": (accounting.pool_layout, {"size": SIZE}),
    "Policy.bytes": (POLICIES["cells"].bytes, {"size": SIZE}),
    "Hardware": (
        Hardware, {"name": "x", "peak_flops": {"float32": 1.0}, "bandwidth": 1.0, "memory": 1,
                   "source": "s"},
    ),
    "bound": (PRESETS["H100-SXM"].bound, {"flops": 1, "moved_bytes": 1, "dtype": "bf16"}),
    "causal_pairs": (accounting.causal_pairs, {"T": 1, "past": 0}),
    "attention_flops": (
        accounting.attention_flops, {"pairs": 1, "heads": 1, "key_width": 1, "value_width": 1},
    ),
    "step_flops": (accounting.step_flops, {"config": LLAMA_3_8B, "T": 1, "past": 0, "batch": 1}),
    "step_traffic": (
        accounting.step_traffic,
        {"config": LLAMA_3_8B, "T": 1, "past": 0, "batch": 1, "weights": "bf16", "cache": "bf16"},
    ),
    "intensity": (accounting.intensity, {"flops": 1, "moved_bytes": 1}),
    "geometry_of_gguf": (
        geometry_of_gguf,
        {"metadata": {"general.architecture": "llama", "llama.block_count": 1,
                      "llama.attention.head_count": 2, "llama.embedding_length": 8}, "name": "m"},
    ),
}  # fmt: skip

# Values among WRONG that an argument takes, as they mean something there.
FINE: Mapping[str, tuple[type, ...]] = {
    "reserved": (bool,), "name": (str,), "source": (str,), "shared": (str,),
    "utilization": (Fraction,), "share": (Fraction,), "peak_flops": (dict,), "bandwidth": (float,),
    "memory": (type(None),),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_value_is_refused_and_quoted(call: str) -> None:
    function, arguments = CALLS[call]
    function(**arguments)
    for name in arguments:
        for wrong in WRONG:
            said = complaint(function, {**arguments, name: wrong})
            if said is None:
                taken = type(wrong) in FINE.get(name, ()) or wrong == 10**5_000
                assert taken, f"{call}({name}={quoted(wrong)}) was taken"
                continue
            quotes = quoted(wrong), " ".join(repr_of(wrong)[:40].split())
            assert any(quote in said for quote in quotes) or name == "metadata", (name, said)
            assert len(said) < 900
            assert "\n" not in said


def complaint(function: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """What a ``ValueError`` says, or ``None`` where there is none. Other errors are faults."""
    try:
        function(**arguments)
    except ValueError as error:
        return str(error)
    return None


def repr_of(value: object) -> str:
    return quoted(value) if isinstance(value, int) else repr(value)


def test_a_name_is_no_geometry() -> None:
    with pytest.raises(
        ValueError, match=r"geometry must be a CacheGeometry, got 'llama-3-8b'; use "
        r"gallery_model\('llama-3-8b'\).geometry",
    ):  # fmt: skip
        cache_size("llama-3-8b", 100)  # type: ignore[arg-type]


def test_huge_numbers_are_exact() -> None:
    tokens = 10**5_000
    assert cache_size(SIZE.geometry, tokens).need_bytes == tokens * 131_072
    assert storage_bytes(1, 1, 1, tokens, 64, 64)["keys"] == tokens * 128
    assert accounting.max_tokens(SIZE, tokens * 131_072 + 1) == tokens
    assert accounting.format_bytes(2**200) == "a number of 201 bits of bytes"


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: type(wrong).__name__)
def test_a_quote_is_one_short_line(wrong: object) -> None:
    assert 0 < len(quoted(wrong)) <= 60
    assert "\n" not in quoted(wrong)


def test_a_repr_that_fails_does_not_hide_the_error() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "Odd" in quoted(Odd())
