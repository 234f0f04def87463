"""Files to models: each tensor lands where it belongs, and a wrong file is a clear error."""

import json
import pickle
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from oracles.folders import change, set_config
from oracles.reference import BY_NAME, save
from safetensors.torch import load_file

from kvbook import UnsupportedModelError, WeightFileError, load_folder
from kvbook.model import weights
from kvbook.model.gguf_file import GGUFFile

pytestmark = pytest.mark.usefixtures("one_thread")



# What is loaded


def test_rows_of_q_k_v_and_of_gate_up_stand_in_this_order(folder: Path) -> None:
    def label(tensors) -> None:
        for number, name in enumerate(
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"], start=1
        ):  # fmt: skip
            tensors[f"model.layers.1.{name}.weight"].fill_(number)

    change(folder, label)
    block = load_folder(folder).blocks[1]
    assert block.attention.qkv.weight[:, 0].tolist() == [1.0] * 32 + [2.0] * 16 + [3.0] * 16
    assert block.mlp.gate_up.weight[:, 0].tolist() == [4.0] * 56 + [5.0] * 56
    assert block.mlp.down.weight.unique().tolist() == [6.0]
    assert block.attention.output.weight.unique().tolist() == [7.0]


def test_the_two_norms_of_a_layer_are_not_mixed_up(folder: Path) -> None:
    def label(tensors) -> None:
        tensors["model.layers.2.input_layernorm.weight"].fill_(1)
        tensors["model.layers.2.post_attention_layernorm.weight"].fill_(2)
        tensors["model.norm.weight"].fill_(3)

    change(folder, label)
    model = load_folder(folder)
    assert model.blocks[2].attention_norm.weight.unique().tolist() == [1.0]
    assert model.blocks[2].mlp_norm.weight.unique().tolist() == [2.0]
    assert model.norm.weight.unique().tolist() == [3.0]


def test_the_model_is_ready_for_inference(folder: Path) -> None:
    model = load_folder(folder)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa", "llama-tied", "qwen2", "qwen3", "deepseek-v2",
        "deepseek-v2-one-query-projection", "deepseek-v3-halves",
    ],
)  # fmt: skip
def test_every_number_of_the_file_is_in_the_model(name: str, originals) -> None:
    model = load_folder(originals[name])
    tensors = load_file(originals[name] / "model.safetensors")
    assert torch.equal(all_numbers(model.parameters()), all_numbers(tensors.values()))


def all_numbers(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).sort().values


@pytest.mark.parametrize(
    ("fields", "asked", "given"),
    [
        ({"dtype": "bfloat16"}, None, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float16"}, None, torch.float16),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, None, torch.bfloat16),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, None, torch.float16),
        ({"dtype": None}, None, torch.float32),
        ({"dtype": "bfloat16"}, torch.float64, torch.float64),
    ],
)
def test_dtype_is_the_one_asked_for_or_the_one_of_the_config(
    fields, asked, given, folder: Path
) -> None:
    set_config(folder, **fields)
    model = load_folder(folder, dtype=asked)
    assert {parameter.dtype for parameter in model.parameters()} == {given}


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "", ["float32"], 32, False])
def test_an_unknown_dtype_is_refused(dtype: object, folder: Path) -> None:
    set_config(folder, dtype=dtype)
    with pytest.raises(UnsupportedModelError, match="asks for dtype") as caught:
        load_folder(folder)
    assert repr(dtype) in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.int8, "I8"), (torch.int64, "I64"), (torch.float8_e4m3fn, "F8_E4M3")],
)
def test_a_tensor_of_codes_is_no_weight(dtype: torch.dtype, stored: str, folder: Path) -> None:
    """Its shape may be right; its numbers mean nothing without scales."""
    name = "model.layers.0.mlp.down_proj.weight"
    change(folder, lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(WeightFileError, match=f"{name}.* is stored as {stored}; allowed: F64, F32"):
        load_folder(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_of_floats_is_one(dtype: torch.dtype, folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    change(folder, lambda t: t.update({name: t[name].to(dtype)}))
    load_folder(folder)


@pytest.mark.parametrize("eps", [1e-6, 0.125])
def test_the_epsilon_is_the_one_of_the_config(eps: float, folder: Path) -> None:
    set_config(folder, rms_norm_eps=eps)
    model = load_folder(folder)
    assert model.config.norm_eps == eps
    assert model.norm.eps == model.blocks[2].mlp_norm.eps == eps


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9), ("num_hidden_layers", 0), ("num_hidden_layers", "3"),
        ("num_hidden_layers", None), ("max_position_embeddings", 10**12),
        ("max_position_embeddings", 2.0), ("rms_norm_eps", 0.0), ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", 1), ("rms_norm_eps", "1e-6"), ("model_type", ["llama"]),
    ],
)  # fmt: skip
def test_a_config_that_no_model_can_have_is_refused_before_anything_is_built(
    name: str, value: object, folder: Path
) -> None:
    set_config(folder, **{name: value})
    with pytest.raises(WeightFileError, match=f"{name} .*Fetch it again") as caught:
        load_folder(folder)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no weight_map from tensors to file names, got None"),
        ({"weight_map": ["a"]}, "no weight_map from tensors to file names"),
        ({"weight_map": {"a": 1}}, "no weight_map from tensors to file names"),
        ({"weight_map": {}}, "must name .safetensors files"),
        ({"weight_map": {"a": "model.bin"}}, "must name .safetensors files"),
        ({"weight_map": {"a": ""}}, "must name .safetensors files"),
        ({"weight_map": {"a": "x\0.safetensors"}}, "must name .safetensors files"),
    ],
)
def test_an_index_that_names_no_files_is_refused(
    index: object, message: str, folder: Path
) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightFileError, match=message):
        load_folder(folder)


def test_more_layers_than_tensors_are_refused_before_a_plan_is_made(folder: Path) -> None:
    set_config(folder, num_hidden_layers=9_999)
    with pytest.raises(WeightFileError, match="states 9,999 layers, but the files hold 30 tensors"):
        load_folder(folder)


def test_a_model_in_several_files_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    sharded = save(BY_NAME["llama-gqa"].build(), tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    one, several = load_folder(folder), load_folder(sharded)
    for (name, a), (_, b) in zip(one.named_parameters(), several.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_rotary_frequencies_in_the_file_are_not_needed(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda t: t.update({name: torch.ones(4)}))
    load_folder(folder)


def test_a_tied_head_that_is_saved_twice_counts_once(originals, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["llama-tied"], tmp_path / "tied"))
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load_folder(folder)
    assert model.head_weight is model.embedding.weight
    change(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(WeightFileError, match="tie_word_embeddings"):
        load_folder(folder)


# Latent heads: H = 4 heads of 6 + 8 rows, a latent of 12, then 8 rows that are rotated.

PAIRS = [0, 2, 4, 6, 1, 3, 5, 7]  # rows whose rotation pairs neighbors, put in order by halves


@pytest.fixture
def latent_folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["deepseek-v3"], tmp_path / "latent"))


def number_rows(tensors: dict[str, torch.Tensor]) -> None:
    """Row r of each tensor of layer 1's attention becomes r."""
    for name, tensor in tensors.items():
        if name.startswith("model.layers.1.self_attn.") and tensor.ndim == 2:
            tensor.copy_(torch.arange(len(tensor))[:, None].expand_as(tensor))


@pytest.mark.parametrize(
    "name",
    ["deepseek-v2", "deepseek-v2-one-query-projection", "deepseek-v3", "deepseek-v3-halves"],
)
def test_rotated_rows_stand_by_halves_whatever_the_file_pairs(
    name: str, originals, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(originals[name], tmp_path / "latent"))
    change(folder, number_rows)
    attention = load_folder(folder).blocks[1].attention
    order = list(range(8)) if name == "deepseek-v3-halves" else PAIRS
    head = [*range(6), *(6 + row for row in order)]
    assert attention.query.weight[:, 0].tolist() == [14 * h + row for h in range(4) for row in head]
    down = [*range(12), *(12 + row for row in order)]
    assert attention.latent_down.weight[:, 0].tolist() == down
    assert attention.latent_up.weight[:, 0].tolist() == list(range(64))
    assert attention.output.weight[:, 0].tolist() == list(range(32))


def test_an_interleaved_query_of_two_projections_is_reordered_in_the_second(
    latent_folder: Path,
) -> None:
    change(latent_folder, number_rows)
    attention = load_folder(latent_folder).blocks[1].attention
    assert attention.query_down.weight[:, 0].tolist() == list(range(20))


def test_the_two_inner_norms_are_not_mixed_up(latent_folder: Path) -> None:
    def label(tensors) -> None:
        tensors["model.layers.2.self_attn.q_a_layernorm.weight"].fill_(1)
        tensors["model.layers.2.self_attn.kv_a_layernorm.weight"].fill_(2)

    change(latent_folder, label)
    attention = load_folder(latent_folder).blocks[2].attention
    assert attention.query_norm.weight.unique().tolist() == [1.0]
    assert attention.latent_norm.weight.unique().tolist() == [2.0]


def test_a_query_of_one_projection_does_not_fit_a_config_with_two(originals, tmp_path) -> None:
    plain = originals["deepseek-v2-one-query-projection"]
    folder = Path(shutil.copytree(plain, tmp_path / "latent"))
    set_config(folder, q_lora_rank=20)
    with pytest.raises(WeightFileError, match=r"missing: .*q_b_proj.*unexpected: .*q_proj"):
        load_folder(folder)


def test_layers_with_experts_are_refused_before_weights_are_looked_for(tmp_path: Path) -> None:
    fields = BY_NAME["deepseek-v3"].config(**BY_NAME["deepseek-v3"].changes).to_dict()
    fields.update(first_k_dense_replace=1, num_hidden_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    with pytest.raises(UnsupportedModelError, match=r"layers 1 to 2 are mixtures of 256 experts"):
        load_folder(tmp_path)


# What is refused


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightFileError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_folder(folder)


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    change(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(WeightFileError, match=r"missing: lm_head\.weight"):
        load_folder(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x"]
)
def test_an_unexpected_tensor_is_named(name: str, folder: Path) -> None:
    change(folder, lambda t: t.update({name: torch.zeros(56, 32)}))
    with pytest.raises(WeightFileError, match=f"unexpected: {name}"):
        load_folder(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    change(folder, lambda t: t.update({name: t[name].t().contiguous()}))
    with pytest.raises(
        WeightFileError, match=rf"{name} has shape \(56, 32\), the config needs \(32, 56\)"
    ):
        load_folder(folder)


def test_several_faults_are_told_at_once(folder: Path) -> None:
    def edit(tensors) -> None:
        tensors["extra"] = tensors.pop("model.norm.weight")

    change(folder, edit)
    with pytest.raises(WeightFileError, match=r"missing: model\.norm\.weight; unexpected: extra"):
        load_folder(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    set_config(folder, num_hidden_layers=5)
    with pytest.raises(WeightFileError, match=r"model\.layers\.3\..* and 13 more"):
        load_folder(folder)


@pytest.mark.parametrize("keep", [4, 100, 5_000, -1])
def test_a_truncated_file_is_named_and_left_alone(keep: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    before = path.read_bytes()
    with pytest.raises(WeightFileError, match=r"model\.safetensors is missing, truncated"):
        load_folder(folder)
    assert path.read_bytes() == before


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save(BY_NAME["llama-gqa"].build(), tmp_path / "sharded", max_shard_size="40KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(WeightFileError, match=lost.name):
        load_folder(folder)


def test_an_index_cannot_point_outside_its_folder(folder: Path) -> None:
    index = {"weight_map": {"x": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightFileError, match=r"outside the folder.*secret"):
        load_folder(folder)


def test_one_tensor_in_two_files_is_refused(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "copy.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "copy.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightFileError, match="in two files"):
        load_folder(folder)


def test_several_files_need_an_index(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "copy.safetensors")
    with pytest.raises(WeightFileError, match=r"2 \.safetensors files and no model"):
        load_folder(folder)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


def test_a_pickled_file_is_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(WeightFileError, match=r"pytorch_model\.bin.*can run code"):
        load_folder(folder)
    assert not (folder / "exploded").exists()


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightFileError, match=r"has no \.safetensors file"):
        load_folder(folder)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"there is no .*config\.json"):
        load_folder(tmp_path)


def test_a_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(WeightFileError, match=r"config\.json is not JSON"):
        load_folder(folder)


def test_an_unsupported_architecture_is_refused_before_weights_are_looked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedModelError, match="mamba"):
        load_folder(tmp_path)


# GGUF


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """Two tensors, one plain and one in 4-bit blocks of 32 values: x = 0.5 · code - 1."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("n", 7)
    writer.add_float64("x", 0.25)
    writer.add_bool("yes", True)
    writer.add_string("word", "naïve")
    writer.add_array("words", ["a", "", "bc"])
    writer.add_array("numbers", [3, -4])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    # Q4_1: scale and minimum as float16, then 16 bytes; low halves are values 0-15, high 16-31.
    codes = bytes(low | (15 - low) << 4 for low in range(16))
    block = np.frombuffer(struct.pack("<ee", 0.5, -1.0) + codes, dtype=np.uint8)
    writer.add_tensor("quantized", block.reshape(1, 20), raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_metadata_and_tensors(small_gguf: Path) -> None:
    file = GGUFFile(small_gguf)
    assert file.metadata == {
        "general.architecture": "llama",
        "n": 7,
        "x": 0.25,
        "yes": True,
        "word": "naïve",
        "words": ["a", "", "bc"],
        "numbers": [3, -4],
    }
    assert file.shapes == {"plain": (2, 3), "quantized": (1, 32)}
    assert file.read("plain").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    up = [0.5 * code - 1 for code in range(16)]
    assert file.read("quantized").tolist() == [up + up[::-1]]


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_bytes(b"<html>not found</html>" * 10)
    with pytest.raises(WeightFileError, match=r"page\.gguf starts with b'<htm'"):
        GGUFFile(path)


@pytest.mark.parametrize("keep", [3, 6, 20, 60, 200])
def test_a_gguf_header_that_ends_too_early(keep: int, small_gguf: Path) -> None:
    small_gguf.write_bytes(small_gguf.read_bytes()[:keep])
    with pytest.raises(WeightFileError, match="damaged GGUF header near byte"):
        GGUFFile(small_gguf)


def test_a_gguf_tensor_that_ends_too_early(small_gguf: Path) -> None:
    content = small_gguf.read_bytes()
    small_gguf.write_bytes(content[: content.index(struct.pack("<ee", 0.5, -1.0)) + 19])
    with pytest.raises(WeightFileError, match="'quantized': 19 of 20 bytes"):
        GGUFFile(small_gguf).read("quantized")


def test_reading_a_gguf_file_never_writes_to_it(small_gguf: Path) -> None:
    before = small_gguf.read_bytes()
    GGUFFile(small_gguf).read("plain").fill_(9)
    assert small_gguf.read_bytes() == before


def test_rows_of_q_and_k_go_from_neighbors_to_halves() -> None:
    """Two heads of width 4, one number per row."""
    rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [10.0], [11.0], [12.0], [13.0]])
    assert weights._halves(rows, 4)[:, 0].tolist() == [0.0, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0]


def test_a_gguf_file_of_another_architecture(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("x", np.zeros(1, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="mamba"):
        weights._load_gguf(path, torch.float32, "cpu")
