"""A store of codes: what is written comes back as the codec has it, wherever it was put."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbook.cache.codec import FLOAT4, FLOAT8, INT4, INT8, Codec
from kvbook.cache.coded import CodedStore, quantized
from kvbook.cache.layer_kind import LayerKind

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, ROWS, HEADS, SLOTS = 2, 3, 3, 12
PER_TOKEN = [
    INT8, replace(INT8, symmetric=False), INT4, replace(INT4, symmetric=True), FLOAT8, FLOAT4,
]  # fmt: skip
CODECS = [made for codec in PER_TOKEN for made in (codec.grouped(2), codec.per_channel(4))]
SPECIMEN = {
    codec: f"{codec.element}-{'' if codec.symmetric else 'a'}symmetric-{codec.group}"
    for codec in CODECS
}

every_codec = pytest.mark.parametrize("codec", CODECS, ids=SPECIMEN.get)
whole_groups = pytest.mark.parametrize(
    "codec", [codec for codec in CODECS if codec.group[0] == 4], ids=SPECIMEN.get
)


def make(codec: Codec, dtype: torch.dtype = torch.float32, slots: int = SLOTS) -> CodedStore:
    return quantized(codec)(LayerKind(HEADS, 6, 4, dtype), LAYERS, ROWS, slots)


def draw(*lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys (…, heads, 6) and values (…, heads, 4), not centered on zero."""
    keys, values = torch.randn(*lead, HEADS, 6) + 1, torch.randn(*lead, HEADS, 4) - 2
    return keys.to(dtype), values.to(dtype)


def everything(store: CodedStore) -> list[tuple[Tensor, Tensor]]:
    return [store.read(layer, (slice(None), slice(None))) for layer in range(LAYERS)]


def full(codec: Codec) -> tuple[CodedStore, list[tuple[Tensor, Tensor]]]:
    """A store with something in every slot, and what reads back, layer by layer."""
    store = make(codec)
    for layer in range(LAYERS):
        store.write(layer, (slice(None), slice(None)), *draw(ROWS, SLOTS))
    return store, [(k.clone(), v.clone()) for k, v in everything(store)]


def same(one: list[tuple[Tensor, Tensor]], two: list[tuple[Tensor, Tensor]]) -> bool:
    return all(a.equal(b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


# ---- Write and read


@every_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_the_round_trip_of_what_was_written(
    codec: Codec, dtype: torch.dtype
) -> None:
    store = make(codec, dtype)
    keys, values = draw(2, 8, dtype=dtype)
    store.write(1, (slice(0, 2), slice(4, 12)), keys, values)
    read = store.read(1, (slice(0, 2), slice(4, 12)))
    assert read[0].equal(codec.round_trip(keys))
    assert read[1].equal(codec.round_trip(values))
    assert all(
        one.equal(two) for one, two in zip(store.round_trip(keys, values), read, strict=True)
    )
    assert all(x.dtype == dtype for x in read)
    assert (read[0] - keys).abs().max() < 2  # and not something else altogether


@every_codec
def test_a_write_changes_its_slots_and_no_others(codec: Codec) -> None:
    store, before = full(codec)
    store.write(1, (slice(1, 3), slice(4, 8)), *draw(2, 4))
    after = everything(store)
    for layer in range(LAYERS):
        for old, new in zip(before[layer], after[layer], strict=True):
            changed = (old != new).any(-1).any(-1)  # (rows, slots)
            assert changed.nonzero().tolist() == (
                [[row, slot] for row in (1, 2) for slot in (4, 5, 6, 7)] if layer == 1 else []
            )


@every_codec
def test_new_storage_reads_as_zero(codec: Codec) -> None:
    assert all((x == 0).all() for pair in everything(make(codec)) for x in pair)


@every_codec
@pytest.mark.parametrize("start", [0, 3, 4, 6])
def test_any_slots_can_be_read(codec: Codec, start: int) -> None:
    """Slices and lists of slots, across the edges of groups, agree."""
    store, pairs = full(codec)
    keys, values = pairs[1]
    for stop in range(start, SLOTS + 1):
        read = store.read(1, (slice(1, 3), slice(start, stop)))
        assert read[0].equal(keys[1:3, start:stop])
        assert read[1].equal(values[1:3, start:stop])
        slots = torch.arange(start, stop).flip(0)
        picked = store.read(1, (torch.tensor([[2], [0]]), slots.expand(2, -1)))
        assert picked[0].equal(keys[[2, 0]][:, start:stop].flip(1))
        assert picked[1].equal(values[[2, 0]][:, start:stop].flip(1))


@every_codec
@pytest.mark.parametrize("rows", [2, slice(0, 2)])
def test_one_row_or_a_slice_of_rows_by_slot_numbers(codec: Codec, rows: int | slice) -> None:
    store, pairs = full(codec)
    slots = torch.tensor([11, 0, 5])
    assert store.read(0, (rows, slots))[0].equal(pairs[0][0][rows, slots])
    assert store.read(0, (rows, slice(3, 6)))[1].equal(pairs[0][1][rows, 3:6])


@pytest.mark.parametrize("codec", [c for c in CODECS if c.group[0] == 1], ids=SPECIMEN.get)
def test_tokens_are_written_one_by_one_where_they_share_no_scale(codec: Codec) -> None:
    """A ragged batch: (N,) rows and (N,) slots, the tokens flattened."""
    store = make(codec)
    rows, slots = torch.tensor([0, 2, 2, 2]), torch.tensor([7, 0, 11, 3])
    keys, values = draw(4)
    store.write(0, (rows, slots), keys, values)
    all_keys, all_values = everything(store)[0]
    assert all_keys[rows, slots].equal(codec.round_trip(keys))
    assert all_values[rows, slots].equal(codec.round_trip(values))
    assert (all_keys != 0).any(-1).any(-1).sum() == 4


@every_codec
def test_whole_groups_by_slot_numbers(codec: Codec) -> None:
    """Row 0 takes slots 8 … 11, row 2 takes slots 0 … 3; flat, or with a row number each."""
    slots = torch.tensor([[8, 9, 10, 11], [0, 1, 2, 3]])
    keys, values = draw(2, 4)
    stores = [make(codec) for _ in range(3)]
    stores[0].write(0, (torch.tensor([[0], [2]]), slots), keys, values)
    flat = (torch.tensor([0] * 4 + [2] * 4), slots.flatten())
    stores[1].write(0, flat, keys.flatten(0, 1), values.flatten(0, 1))
    for i, (row, start) in enumerate([(0, 8), (2, 0)]):
        where = (slice(row, row + 1), slice(start, start + 4))
        stores[2].write(0, where, keys[i : i + 1], values[i : i + 1])
    assert (everything(stores[2])[0][0] != 0).any()
    assert same(everything(stores[0]), everything(stores[2]))
    assert same(everything(stores[1]), everything(stores[2]))


@every_codec
def test_no_tokens(codec: Codec) -> None:
    store, before = full(codec)
    none = torch.zeros(0, dtype=torch.long)
    store.write(0, (none, none), *draw(0))
    store.write(0, (slice(0, 2), slice(4, 4)), *draw(2, 0))
    assert same(everything(store), before)
    assert store.read(0, (none, none))[0].shape == (0, HEADS, 6)


def test_keys_per_channel_beside_values_per_token() -> None:
    """The pairing of KIVI (Liu et al. 2024)."""
    make_store = quantized(INT4.per_channel(4), INT4.grouped(2))
    store = make_store(LayerKind(HEADS, 6, 4), LAYERS, ROWS, SLOTS)
    keys, values = draw(ROWS, 8)
    store.write(0, (slice(None), slice(4, 12)), keys, values)
    read = store.read(0, (slice(None), slice(4, 12)))
    assert read[0].equal(INT4.per_channel(4).round_trip(keys))
    assert read[1].equal(INT4.grouped(2).round_trip(values))
    assert store.write_size == 4


def test_wider_keys_are_rounded_to_the_type_of_the_cache_first() -> None:
    store = make(INT8.grouped(2), torch.bfloat16)
    keys, values = draw(1, 1)
    store.write(0, (slice(0, 1), slice(0, 1)), keys, values)
    assert store.read(0, (slice(0, 1), slice(0, 1)))[0].equal(
        INT8.grouped(2).round_trip(keys.bfloat16())
    )


def test_a_latent_cache_stores_no_values() -> None:
    store = quantized(INT8)(LayerKind(1, 32, 0), 1, 1, 8)
    store.write(0, (slice(None), slice(0, 2)), torch.ones(1, 2, 1, 32), torch.ones(1, 2, 1, 0))
    keys, values = store.read(0, (slice(None), slice(0, 2)))
    assert keys.equal(torch.ones(1, 2, 1, 32))
    assert values.shape == (1, 2, 1, 0)
    assert store.allocated_bytes == 8 * (32 + 4)


# ---- Fill


@every_codec
def test_filling_with_zero_clears_what_was_there_even_nan(codec: Codec) -> None:
    store = make(codec)
    keys, values = draw(ROWS, SLOTS)
    store.write(1, (slice(None), slice(None)), keys * math.nan, values * math.nan)
    store.fill(1, 4, 12, 0.0)
    for x in store.read(1, (slice(None), slice(None))):
        assert (x[1, 4:] == 0).all()
        assert x[1, :4].isnan().all()
        assert x[[0, 2]].isnan().all()


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("poison", [math.nan, 1e10, -1e10])
def test_poison_is_seen_in_its_slots_only(codec: Codec, poison: float, dtype: torch.dtype) -> None:
    store = make(codec, dtype)
    for layer in range(LAYERS):
        store.write(layer, (slice(None), slice(None)), *draw(ROWS, SLOTS, dtype=dtype))
    before = everything(store)
    store.fill(1, 4, 8, poison)
    for old, new in zip(before, everything(store), strict=True):
        for x, y in zip(old, new, strict=True):
            filled = y[1, 4:8].double()
            assert (filled.isnan() | (filled.abs() > 6e9)).all()
            y[1, 4:8] = x[1, 4:8]
            assert y.equal(x)


# ---- Copies


@every_codec
def test_rows_are_copied_from_what_they_were(codec: Codec) -> None:
    """[1, 0, 1]: a swap and a fork at once. Slots 8 to 11 stay."""
    store, before = full(codec)
    store.copy_rows([1, 0, 1], 8)
    for old, new in zip(before, everything(store), strict=True):
        for x, y in zip(old, new, strict=True):
            assert y[:, :8].equal(x[[1, 0, 1], :8])
            assert y[:, 8:].equal(x[:, 8:])


@every_codec
def test_fewer_rows_leave_the_others_alone(codec: Codec) -> None:
    store, before = full(codec)
    store.copy_rows([2], SLOTS)
    for old, new in zip(before, everything(store), strict=True):
        for x, y in zip(old, new, strict=True):
            assert y.equal(x[[2, 1, 2]])


@every_codec
def test_a_part_of_a_group_is_copied_whole(codec: Codec) -> None:
    store, before = full(codec)
    store.copy_rows([1, 1], 5)
    copied = 8 if codec.group[0] == 4 else 5
    keys = everything(store)[0][0]
    assert keys[0, :copied].equal(before[0][0][1, :copied])
    assert keys[0, copied:].equal(before[0][0][0, copied:])


@every_codec
def test_slots_move_inside_a_row(codec: Codec) -> None:
    """Overlapping: 0 … 7 to 4 … 11 reads all before it writes."""
    store, before = full(codec)
    store.copy_slots(1, list(range(8)), list(range(4, 12)))
    for old, new in zip(before, everything(store), strict=True):
        for x, y in zip(old, new, strict=True):
            assert y[1, 4:].equal(x[1, :8])
            assert y[1, :4].equal(x[1, :4])
            assert y[[0, 2]].equal(x[[0, 2]])


# ---- Sizes and shapes


def test_a_store_is_described_as_a_dense_one_is() -> None:
    store = make(INT8.grouped(2), torch.bfloat16)
    assert (store.layers, store.kind) == (LAYERS, LayerKind(HEADS, 6, 4, torch.bfloat16))
    assert (store.rows, store.slots, store.write_size) == (ROWS, SLOTS, 1)
    assert store.device == torch.device("cpu")


def test_a_maker_takes_names_too() -> None:
    store = quantized(FLOAT8)(LayerKind(1, 32, 32), 1, 1, 4)
    assert store.allocated_bytes == 4 * 2 * (32 + 4)


def test_the_storage_is_all_of_its_tensors() -> None:
    """2 layers, 3 rows of 12 slots, 3 heads; of 10 channels, every 2 share a scale, or each has
    one in common with 4 tokens."""
    assert make(INT8.grouped(2)).allocated_bytes == 2 * 3 * 12 * 3 * (10 + 5 * 4)
    assert make(INT8.per_channel(4)).allocated_bytes == 2 * 3 * 12 * 3 * (10 + 10)
    assert make(INT4.grouped(2)).allocated_bytes == 2 * 3 * 12 * 3 * (3 + 2 + 2 * 5 * 4)
    assert make(FLOAT4.grouped(2)).allocated_bytes == 2 * 3 * 12 * 3 * (3 + 2 + 5)
    for codec in CODECS:
        store = make(codec)
        assert sum(tensor.nbytes for tensor in store.tensors) == store.allocated_bytes
        for tensor in store.tensors:
            tensor.zero_()
        assert same(everything(store), everything(make(codec)))


# ---- Bad input: nothing has changed


def attempts() -> dict[str, Callable[[CodedStore], None]]:
    index = torch.tensor
    return {
        "slots 2 to 6": lambda s: s.write(0, (slice(None), slice(2, 6)), *draw(ROWS, 4)),
        "slots 4 to 7": lambda s: s.write(0, (slice(None), slice(4, 7)), *draw(ROWS, 3)),
        "3 slots": lambda s: s.write(0, (index([1] * 3), index([0, 1, 2])), *draw(3)),
        "slots that start": lambda s: s.write(0, (index([1] * 4), index([2, 3, 4, 5])), *draw(4)),
        ".* gaps": lambda s: s.write(0, (index([1] * 4), index([0, 1, 2, 4])), *draw(4)),
        ".* change row": lambda s: s.write(0, (index([1, 1, 1, 2]), index([0, 1, 2, 3])), *draw(4)),
        "slots 0 to 6": lambda s: s.fill(1, 0, 6, 0.0),
        "slots 1 to 12": lambda s: s.fill(1, 1, 12, 0.0),
        "1 slots": lambda s: s.copy_slots(1, [0], [4]),
    }


@whole_groups
@pytest.mark.parametrize("given", attempts())
def test_a_part_of_a_group_cannot_change(codec: Codec, given: str) -> None:
    """Also where only the values share scales: the keys must not have been written then."""
    for keys in (codec, INT8.grouped(2)):
        store = quantized(keys, codec)(LayerKind(HEADS, 6, 4), LAYERS, ROWS, SLOTS)
        for layer in range(LAYERS):
            store.write(layer, (slice(None), slice(None)), *draw(ROWS, SLOTS))
        before = everything(store)
        with pytest.raises(ValueError, match=rf"whole groups of 4 .* got {given}.*hold"):
            attempts()[given](store)
        assert same(everything(store), before)


@whole_groups
def test_groups_must_divide_the_slots(codec: Codec) -> None:
    with pytest.raises(
        ValueError, match="groups of 4 tokens do not divide 10 slots; use a multiple"
    ):
        make(codec, slots=10)


def test_groups_must_divide_the_widths() -> None:
    with pytest.raises(ValueError, match="groups of 3 channels do not divide a width of 4"):
        quantized(INT8.grouped(3))(LayerKind(1, 6, 4), 1, 1, 4)


def test_groups_of_keys_and_values_must_nest() -> None:
    with pytest.raises(ValueError, match="of 4 tokens for keys and 6 for values do not nest"):
        quantized(INT8.per_channel(4), INT8.per_channel(6))(LayerKind(1, 6, 4), 1, 1, 12)
    nested = quantized(INT8.per_channel(2), INT8.per_channel(6))(LayerKind(1, 6, 4), 1, 1, 12)
    assert nested.write_size == 6


@pytest.mark.parametrize("codec", ["int8", None, 8, True, torch.int8, CodedStore], ids=repr)
def test_a_store_is_made_from_codecs(codec: Any) -> None:
    """At once, and not when the cache is made."""
    with pytest.raises(ValueError, match="such as INT8.*got " + re.escape(repr(codec))):
        quantized(codec)
    if codec is not None:  # None: values take the codec of keys
        with pytest.raises(ValueError, match="takes a Codec, such as INT8"):
            quantized(INT8, codec)


def test_a_build_without_float8_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(ValueError, match="no float8_e4m3fn"):
        quantized(FLOAT8)(LayerKind(1, 32, 32), 1, 1, 4)
