"""Lines that engines, tools, pages and papers report: reproduced to the last digit, or explained.

``reported.json`` holds each figure as it was printed, with its settings and its source. A figure
that the calculator does not reproduce says which of the two is wrong, and why.
"""

import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvbook.accounting.gallery import gallery_model
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layers import Layer, full_layer, window_layer
from kvbook.accounting.need import CacheSize, cache_size
from kvbook.accounting.pool import PoolLayout, pool_layout
from kvbook.accounting.units import UNITS, parse_bytes

REPORTED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("reported.json").read_text(encoding="utf-8")
)
RIGHT = [entry for entry in REPORTED if "wrong" not in entry]
WRONG = [entry for entry in REPORTED if "wrong" in entry]


def name(entry: dict[str, Any]) -> str:
    return f"{entry['engine']}: {entry['model']} {entry['figure']}".replace(" ", "_")


# ---- Predicted


def geometry_of(entry: dict[str, Any]) -> CacheGeometry:
    """The gallery's, or the one that stands in the report: layers of one kind, or of several."""
    if "geometry" not in entry:
        return gallery_model(entry["model"]).geometry
    stated = entry["geometry"]
    kinds = [stated] if isinstance(stated, dict) else stated
    return CacheGeometry(entry["model"], tuple(layer for kind in kinds for layer in layers(kind)))


def layers(kind: dict[str, int]) -> list[Layer]:
    sizes = kind["kv_heads"], kind["key_width"], kind["value_width"]
    made = window_layer(kind["window"], *sizes) if "window" in kind else full_layer(*sizes)
    return [made] * kind["layers"]


def size_of(entry: dict[str, Any]) -> CacheSize:
    settings, geometry = entry["settings"], geometry_of(entry)
    kind = settings.get("layers")
    if kind is not None:
        chosen = tuple(layer for layer in geometry.layers if layer.kind == kind)
        geometry = CacheGeometry(geometry.name, chosen)
    return cache_size(
        geometry,
        settings.get("tokens", settings.get("length", 1)),
        settings.get("batch", 1),
        settings.get("dtype", "bf16"),
        devices=settings.get("tp", 1),
    )


def memory_of(entry: dict[str, Any]) -> tuple[int, int]:
    """The least and the largest memory that is printed as this one, which has two decimals."""
    number, unit = entry["settings"]["memory"].split()
    assert re.fullmatch(r"\d+\.\d\d", number)
    half = Fraction(1, 200) * UNITS[unit]
    middle = Fraction(number) * UNITS[unit]
    assert parse_bytes(entry["settings"]["memory"]) == int(middle)
    return int(middle - half), int(middle + half)


def blocks_of(entry: dict[str, Any]) -> tuple[PoolLayout, list[int]]:
    """The blocks that fit into the memory: all numbers that its two decimals allow."""
    layout = pool_layout(size_of(entry))
    low, high = (memory // layout.block_bytes for memory in memory_of(entry))
    return layout, list(range(low, high + 1))


def in_bytes(entry: dict[str, Any]) -> list[Fraction]:
    size, settings = size_of(entry), entry["settings"]
    items = size.reservation if settings.get("whole") else size.need
    part = settings.get("part")
    total = sum(items.values()) if part is None else items[part]
    if settings.get("whole"):
        assert settings["tokens"] % size.block_size == 0  # no rounding of ours
    return [Fraction(total, UNITS[entry["unit"]])]


def in_states(entry: dict[str, Any]) -> list[Fraction]:
    state = size_of(entry).constant_state_bytes
    assert state is not None
    return [Fraction(state * entry["settings"]["copies"], UNITS[entry["unit"]])]


def in_blocks(entry: dict[str, Any]) -> list[Fraction]:
    return [Fraction(blocks) for blocks in blocks_of(entry)[1]]


def in_tokens(entry: dict[str, Any]) -> list[Fraction]:
    layout, possible = blocks_of(entry)
    return [Fraction(layout.tokens(blocks)) for blocks in possible]


def tokens_in_blocks(entry: dict[str, Any]) -> list[Fraction]:
    return [Fraction(pool_layout(size_of(entry)).tokens(entry["settings"]["blocks"]))]


def concurrency(entry: dict[str, Any]) -> list[Fraction]:
    tokens = pool_layout(size_of(entry)).tokens(entry["settings"]["blocks"])
    return [Fraction(tokens, entry["settings"]["length"])]


def concurrency_times_length(entry: dict[str, Any]) -> list[Fraction]:
    layout, possible = blocks_of(entry)
    each, length = layout.blocks(size_of(entry)), entry["settings"]["length"]
    return [Fraction(blocks * length // each) for blocks in possible]


def tokens_of_a_block(entry: dict[str, Any]) -> list[Fraction]:
    kinds = pool_layout(size_of(entry)).kinds
    full = [kind.block_tokens for kind in kinds if kind.layer.window is None]
    return [Fraction(tokens) for tokens in full]


PREDICT: dict[str, Callable[[dict[str, Any]], list[Fraction]]] = {
    "bytes": in_bytes, "states": in_states, "blocks in memory": in_blocks,
    "tokens in memory": in_tokens, "tokens in blocks": tokens_in_blocks,
    "concurrency": concurrency, "concurrency times length": concurrency_times_length,
    "tokens of a block": tokens_of_a_block,
}  # fmt: skip


def reproduces(entry: dict[str, Any]) -> bool:
    """Whether a prediction rounds to the figure, to its last digit."""
    figure = Fraction(entry["figure"])
    last_digit = Fraction(1, 10 ** len(entry["figure"].partition(".")[2]))
    return any(
        abs(predicted - figure) <= last_digit / 2 for predicted in PREDICT[entry["what"]](entry)
    )


# ---- Against reported


@pytest.mark.parametrize("entry", RIGHT, ids=name)
def test_a_reported_figure_is_reproduced_to_the_last_digit(entry: dict[str, Any]) -> None:
    assert reproduces(entry)


@pytest.mark.parametrize("entry", WRONG, ids=name)
def test_a_figure_that_is_not_reproduced_is_explained(entry: dict[str, Any]) -> None:
    assert not reproduces(entry)
    assert len(entry["wrong"]) > 40


FACTORS = {"187.5": Fraction(1, 2), "1605632": Fraction(28), "0.984": Fraction(2),
           "15.38": Fraction(2), "123.05": Fraction(2)}  # fmt: skip


@pytest.mark.parametrize("entry", [e for e in WRONG if e["figure"] in FACTORS], ids=name)
def test_a_mistake_has_the_factor_that_is_said(entry: dict[str, Any]) -> None:
    (predicted,) = PREDICT[entry["what"]](entry)
    figure = Fraction(entry["figure"])
    last_digit = Fraction(1, 10 ** len(entry["figure"].partition(".")[2]))
    assert abs(predicted * FACTORS[entry["figure"]] - figure) <= last_digit / 2


def test_there_are_enough_of_them_and_most_agree() -> None:
    assert len(REPORTED) >= 40
    assert len(RIGHT) >= 40
    assert len({entry["source"] for entry in REPORTED}) >= 20


@pytest.mark.parametrize("entry", REPORTED, ids=name)
def test_every_figure_says_where_it_was_printed(entry: dict[str, Any]) -> None:
    assert entry["source"].startswith("https://")
    assert entry["engine"]
    assert entry["model"]
    assert entry["unit"] in {*UNITS, "blocks", "tokens", "times"}
    assert set(entry) <= {
        "engine", "source", "model", "figure", "unit", "what", "settings", "geometry", "wrong",
        "note",
    }  # fmt: skip
