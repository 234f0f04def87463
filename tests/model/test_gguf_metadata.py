"""What a GGUF file may say that the file of SmolLM2 does not, in small files made for it."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from oracles.gguf_files import TOKENIZER, write_llama
from oracles.toys import reference_logits, text, toy

from kvbook import UnsupportedModelError, WeightFileError, load_tokenizer
from kvbook.model import weights
from kvbook.model.gguf_file import GGUFFile
from kvbook.model.transformer import Transformer

TEXT = text(12)


def load(path: Path) -> Transformer:
    return weights._load_gguf(path, torch.float64, "cpu")


def same_logits(path: Path, model: Transformer) -> None:
    """Weights and epsilon pass through float32, so the oracle runs on what is loaded."""
    loaded = load(path)
    error = (loaded(torch.tensor([TEXT]))[0] - reference_logits(model, TEXT)).abs().max()
    assert error < 1e-4


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_data_starts_at_a_multiple_of_the_alignment(alignment: int, tmp_path: Path) -> None:
    model = toy(head_dim=4)
    path = write_llama(tmp_path / "m.gguf", model, alignment)
    assert GGUFFile(path).metadata.get("general.alignment", 32) == alignment
    same_logits(path, model)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_is_read_and_a_tied_one_is_the_embedding(
    tied: bool, tmp_path: Path
) -> None:
    model = toy(head_dim=4, tied_embeddings=tied)
    path = write_llama(tmp_path / "m.gguf", model)
    loaded = load(path)
    assert loaded.config.tied_embeddings is tied
    assert (loaded.head_weight is loaded.embedding.weight) is tied
    same_logits(path, model)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.25])
def test_the_epsilon_is_the_one_of_the_file(eps: float, tmp_path: Path) -> None:
    model = toy(head_dim=4, norm_eps=eps)
    path = write_llama(tmp_path / "m.gguf", model)
    assert load(path).config.norm_eps == pytest.approx(eps, rel=1e-6)
    same_logits(path, model)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_the_rotary_base_is_the_one_of_the_file(theta: float, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", toy(head_dim=4, rope_theta=theta))
    assert load(path).config.rope_theta == theta


def test_an_unsigned_number_above_2_to_the_31_is_not_negative(tmp_path: Path) -> None:
    numbers = {"one": 3_000_000_000, "largest": 2**32 - 1}
    path = write_llama(tmp_path / "m.gguf", toy(head_dim=4), extra=numbers)
    metadata = GGUFFile(path).metadata
    assert {name: metadata[name] for name in numbers} == numbers


def test_numbers_of_every_width_and_sign(tmp_path: Path) -> None:
    path = tmp_path / "numbers.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    wide: dict[str, tuple[Any, Any]] = {
        "u8": (writer.add_uint8, 200), "i8": (writer.add_int8, -100),
        "u16": (writer.add_uint16, 60_000), "i16": (writer.add_int16, -30_000),
        "u32": (writer.add_uint32, 4_000_000_000), "i32": (writer.add_int32, -2_000_000_000),
        "u64": (writer.add_uint64, 2**64 - 1), "i64": (writer.add_int64, -(2**63)),
        "f32": (writer.add_float32, 0.375), "f64": (writer.add_float64, 0.1),
        "no": (writer.add_bool, False),
    }  # fmt: skip
    for name, (add, value) in wide.items():
        add(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFFile(path).metadata
    assert {name: metadata[name] for name in wide} == {k: value for k, (_, value) in wide.items()}


def test_sizes_that_agree_may_be_stated_twice(tmp_path: Path) -> None:
    extra = {
        "llama.rope.dimension_count": 4, "llama.attention.key_length": 4,
        "llama.attention.value_length": 4, "llama.vocab_size": 29,
        "llama.rope.scaling.type": "none",
    }  # fmt: skip
    same_logits(write_llama(tmp_path / "m.gguf", toy(head_dim=4), extra=extra), toy(head_dim=4))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"does not build: rope\.scaling\.type"),
        ({"llama.expert_count": 8}, "does not build: expert_count"),
        ({"llama.attention.sliding_window": 4}, r"does not build: attention\.sliding_window"),
        ({"llama.rope.dimension_count": 2}, r"llama\.rope\.dimension_count = 2; kvbook builds 4"),
        ({"llama.attention.key_length": 8}, "key_length = 8; kvbook builds 4"),
        ({"llama.vocab_size": 30}, "vocab_size = 30; kvbook builds 29"),
    ],
)
def test_a_field_that_would_be_ignored_is_refused(
    extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_llama(tmp_path / "m.gguf", toy(head_dim=4), extra=extra)
    with pytest.raises(UnsupportedModelError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_count", None), ("block_count", 0), ("block_count", 2**31),
        ("block_count", 2.0), ("embedding_length", "16"), ("attention.head_count", [4, 4]),
        ("attention.head_count", 0), ("attention.head_count_kv", None),
        ("attention.layer_norm_rms_epsilon", None), ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", float("nan")), ("rope.freq_base", 10_000),
        ("rope.freq_base", float("inf")), ("rope.freq_base", -1.0),
    ],
)  # fmt: skip
def test_a_field_that_is_missing_or_of_the_wrong_kind_is_quoted(
    name: str, value: object, tmp_path: Path
) -> None:
    path = write_llama(tmp_path / "m.gguf", toy(head_dim=4), extra={f"llama.{name}": value})
    with pytest.raises(WeightFileError, match=rf"llama\.{name} = .*Fetch it again") as caught:
        load(path)
    assert repr(value) in str(caught.value)


def test_more_layers_than_tensors_are_refused_before_a_plan_is_made(tmp_path: Path) -> None:
    extra = {"llama.block_count": 2**31 - 1}
    path = write_llama(tmp_path / "m.gguf", toy(head_dim=4), extra=extra)
    with pytest.raises(WeightFileError, match="states 2,147,483,647 layers, but holds 21 tensors"):
        load(path)


def test_heads_that_do_not_share_the_width_evenly_are_refused(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "m.gguf", toy(head_dim=4), extra={"llama.attention.head_count": 3}
    )
    with pytest.raises(WeightFileError, match="embedding_length of 16 that its 3 heads"):
        load(path)


# ---- The tokenizer in the file


def test_a_small_tokenizer_reads_and_writes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_llama(tmp_path / "m.gguf", toy(head_dim=4), extra=TOKENIZER))
    assert tokenizer.encode("abc ab<|end|>") == [5, 3, 6, 0]
    assert tokenizer.decode([5, 3, 6, 0]) == "abc ab<|end|>"
    assert tokenizer.stop_tokens == {0}
    assert tokenizer.vocab_size == 13


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", None, r"no list of str as tokenizer\.ggml\.tokens, got None"),
        ("tokens", "abc", r"no list of str as tokenizer\.ggml\.tokens, got 'abc'"),
        ("tokens", [1, 2], r"no list of str as tokenizer\.ggml\.tokens, got \[1, 2\]"),
        ("tokens", ["a"] * 13, "lists 13 tokens, 1 of them different"),
        ("token_type", [1], "and 1 types"),
        ("token_type", None, r"no list of int as tokenizer\.ggml\.token_type"),
        ("merges", None, r"no list of str as tokenizer\.ggml\.merges"),
        ("merges", ["ab"], "merges that do not fit"),
        ("merges", ["x y"], "merges that do not fit"),
        ("merges", ["a b c"], "merges that do not fit"),
        ("eos_token_id", 13, "eos_token_id 13; it must be from 0 to 12"),
        ("eos_token_id", None, "eos_token_id None; it must be from 0 to 12"),
    ],
)
def test_a_damaged_tokenizer_is_named(
    name: str, value: object, message: str, tmp_path: Path
) -> None:
    extra = {**TOKENIZER, f"tokenizer.ggml.{name}": value}
    path = write_llama(tmp_path / "m.gguf", toy(head_dim=4), extra=extra)
    with pytest.raises(WeightFileError, match=message):
        load_tokenizer(path)
