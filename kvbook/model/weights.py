"""Real weights: files to a ``Transformer``.

Knows: the names and the layout of tensors in GGUF and Hugging Face files, and where each belongs.
Does not know: how a file was fetched, what the model computes.

Every tensor of a file is used exactly once. A missing, an unexpected or a misshapen one is an
error that names it. The whole list is checked before the first tensor is read. Only formats that
hold nothing but data are read: a pickled file can run code when it is opened.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbook.config import LatentConfig, ModelConfig
from kvbook.errors import UnsupportedModelError, WeightFileError
from kvbook.model.download import smollm2_gguf
from kvbook.model.gguf_config import gguf_config
from kvbook.model.gguf_file import GGUFFile
from kvbook.model.json_file import read_object
from kvbook.model.rope import Rope
from kvbook.model.target import float_dtype, usable_device
from kvbook.model.transformer import Transformer

# kvbook's parameter -> the file's tensors whose rows, one after the other, make it up.
HF_BLOCK = {
    "attention_norm.weight": ["input_layernorm.weight"],
    "attention.qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "attention.qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "attention.q_norm.weight": ["self_attn.q_norm.weight"],
    "attention.k_norm.weight": ["self_attn.k_norm.weight"],
    "attention.query_down.weight": ["self_attn.q_a_proj.weight"],
    "attention.query_norm.weight": ["self_attn.q_a_layernorm.weight"],
    "attention.query.weight": ["self_attn.q_b_proj.weight"],
    "attention.latent_down.weight": ["self_attn.kv_a_proj_with_mqa.weight"],
    "attention.latent_norm.weight": ["self_attn.kv_a_layernorm.weight"],
    "attention.latent_up.weight": ["self_attn.kv_b_proj.weight"],
    "attention.output.weight": ["self_attn.o_proj.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
    "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.down.weight": ["mlp.down_proj.weight"],
}
# With one query projection instead of two, its tensor has a plainer name.
HF_BLOCK_PLAIN_QUERY = {**HF_BLOCK, "attention.query.weight": ["self_attn.q_proj.weight"]}
HF_MODEL = {
    "embedding.weight": ["model.embed_tokens.weight"],
    "norm.weight": ["model.norm.weight"],
    "head.weight": ["lm_head.weight"],
}
GGUF_BLOCK = {
    "attention_norm.weight": ["attn_norm.weight"],
    "attention.qkv.weight": [f"attn_{x}.weight" for x in "qkv"],
    "attention.output.weight": ["attn_output.weight"],
    "mlp_norm.weight": ["ffn_norm.weight"],
    "mlp.gate_up.weight": ["ffn_gate.weight", "ffn_up.weight"],
    "mlp.down.weight": ["ffn_down.weight"],
}
GGUF_MODEL = {
    "embedding.weight": ["token_embd.weight"],
    "norm.weight": ["output_norm.weight"],
    "head.weight": ["output.weight"],
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of what exists: some hundred layers, ten million positions. More would take endless memory.
MOST = {"num_hidden_layers": 10_000, "max_position_embeddings": 1 << 24}
STORED = ("F64", "F32", "F16", "BF16")  # in a safetensors file


class WeightSource(Protocol):
    """A file, or several, that hold named tensors."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor: ...


def load_smollm2(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """SmolLM2-135M-Instruct with its released 4-bit weights, decoded: 134.5 million numbers.

    The file is fetched the first time (93 MB). Errors are those of ``smollm2_gguf``, and
    ``ValueError`` for a device that cannot be used here or a dtype that no model computes in.
    """
    dtype, device = float_dtype(dtype), usable_device(device)
    return _load_gguf(smollm2_gguf(), dtype, device)


def load_folder(
    path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Transformer:
    """A model from a Hugging Face folder: ``config.json`` and ``*.safetensors``.

    ``dtype=None`` takes the one that the config names, or float32 if it names none.
    Raises ``UnsupportedModelError`` for an architecture that kvbook does not build, and
    ``WeightFileError`` for missing, damaged, unexpected or misshapen content; ``ValueError`` for a
    device that cannot be used here or a dtype that no model computes in.
    """
    device = usable_device(device)
    if dtype is not None:
        float_dtype(dtype)
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        raise WeightFileError(
            f"there is no {file}. Give a folder with config.json and .safetensors files."
        )
    fields = read_object(file)
    _check_model_fields(file, fields)
    config = ModelConfig.from_hf(fields)
    if dtype is None:
        dtype = _config_dtype(fields)
    latent = config.latent
    plain_query = latent is not None and latent.q_rank is None
    block = HF_BLOCK_PLAIN_QUERY if plain_query else HF_BLOCK
    with SafetensorsFolder(folder) as source:
        if config.n_layers > len(source.shapes):
            raise WeightFileError(
                f"{file} states {config.n_layers:,} layers, but the files hold "
                f"{len(source.shapes):,} tensors. Fetch the weights and config.json of the same "
                "model again."
            )
        plan = _plan(config, HF_MODEL, block, "model.layers.{}.")
        _drop_redundant(source, config)
        read: Callable[[str], Tensor] = source.read
        if latent is not None and _pairs_neighbors(fields):
            read = _latent_reader(source, latent)
        return _build(config, plan, source, read, dtype, device)


def _check_model_fields(file: Path, fields: dict[str, Any]) -> None:
    """Raise ``WeightFileError`` for what would take endless memory, or that a model cannot have."""
    kind, eps = fields.get("model_type"), fields.get("rms_norm_eps", 1e-6)
    if kind is not None and not isinstance(kind, str):
        raise WeightFileError(f"{file} has model_type {kind!r:.80}, not a name. Fetch it again.")
    for name, most in MOST.items():
        count = fields.get(name, 1)
        if type(count) is not int or not 1 <= count <= most:
            raise WeightFileError(
                f"{file} has {name} {count!r:.80}; it must be an integer from 1 to {most:,}. Fetch "
                "it again."
            )
    if type(eps) is not float or not 0 < eps < 1:
        raise WeightFileError(
            f"{file} has rms_norm_eps {eps!r:.80}; it must be a number between 0 and 1. Fetch it "
            "again."
        )


def _pairs_neighbors(fields: dict[str, Any]) -> bool:
    named = fields.get("rope_interleave", True)
    if not isinstance(named, bool):
        raise UnsupportedModelError(
            f"rope_interleave is {named!r:.80} in the config; allowed: true, false, or no such "
            "field, which means true"
        )
    return named


def _latent_reader(source: WeightSource, latent: LatentConfig) -> Callable[[str], Tensor]:
    """A reader that puts rows whose rotation pairs neighbors into kvbook's order, by halves.

    Those rows are the last ``rope_dim`` of every query head, and the last of the down-projection.
    """
    whole = {
        "q_proj.weight": latent.nope_dim + latent.rope_dim,
        "q_b_proj.weight": latent.nope_dim + latent.rope_dim,
        "kv_a_proj_with_mqa.weight": latent.kv_rank + latent.rope_dim,
    }

    def read(name: str) -> Tensor:
        rows = source.read(name)
        width = next((width for end, width in whole.items() if name.endswith(end)), None)
        if width is None:
            return rows
        heads = rows.unflatten(0, (-1, width))
        plain, rotated = heads.split([width - latent.rope_dim, latent.rope_dim], 1)
        rotated = _halves(rotated.flatten(0, 1), latent.rope_dim).view(rotated.shape)
        return torch.cat([plain, rotated], 1).flatten(0, 1)

    return read


class SafetensorsFolder:
    """The safetensors files of one folder, opened together: a context manager.

    ``shapes``: tensor name -> shape. Raises ``WeightFileError`` for a file that is damaged, and
    for a tensor that is stored in no floating-point format: integers are codes of a quantization.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}  # tensor name -> the open file that holds it
        self._open = ExitStack()

    def __enter__(self) -> "SafetensorsFolder":
        with self._open:  # closes what was opened if a later file is damaged
            for path in _safetensors_files(self.folder):
                self._add(path)
            self._open = self._open.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _add(self, path: Path) -> None:
        try:
            file = self._open.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise WeightFileError(
                f"{path} is missing, truncated or not a safetensors file ({error}). Fetch it again."
            ) from error
        for name in file.keys():  # noqa: SIM118  (the file is no mapping)
            if name in self.shapes:
                raise WeightFileError(
                    f"tensor {name!r} is in two files of {self.folder}. Keep one set of files."
                )
            part = file.get_slice(name)
            if part.get_dtype() not in STORED:
                raise WeightFileError(
                    f"tensor {name!r:.80} of {path} is stored as {part.get_dtype()}; allowed: "
                    f"{', '.join(STORED)}. Fetch the model without quantization."
                )
            self._files[name] = file
            self.shapes[name] = tuple(part.get_shape())

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in _indexed_files(index)]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise WeightFileError(
            f"{folder} has {len(files)} .safetensors files and no {index.name} that says which "
            "belong to the model. Add it, or keep the one file."
        )
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        raise WeightFileError(
            f"{folder} has {pickled}, but no .safetensors file. kvbook does not read pickled "
            "weights, because opening one can run code. Convert it to safetensors."
        )
    raise WeightFileError(f"{folder} has no .safetensors file. Give a folder that has one.")


def _indexed_files(index: Path) -> list[str]:
    """The names of the files that an index lists, each once."""
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise WeightFileError(
            f"{index} has no weight_map from tensors to file names, got {named!r:.80}. Fetch it "
            "again."
        )
    names = sorted(set(named.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise WeightFileError(
            f"{index} names files outside the folder: {outside[:3]!r:.200}. Fetch it again."
        )
    wrong = [name for name in names if not name.endswith(".safetensors") or "\0" in name]
    if wrong or not names:
        raise WeightFileError(
            f"{index} names {wrong[:3]!r:.200}; it must name .safetensors files. Fetch it again."
        )
    return names


def _config_dtype(fields: dict[str, Any]) -> torch.dtype:
    """``dtype``; older configs call it ``torch_dtype``, which counts where the other is absent."""
    named = [fields.get("dtype"), fields.get("torch_dtype"), "float32"]
    name = next(name for name in named if name is not None)
    if not isinstance(name, str) or name not in DTYPES:
        raise UnsupportedModelError(
            f"the config asks for dtype {name!r:.80}; allowed: {', '.join(DTYPES)}. Pass dtype=..."
        )
    return DTYPES[name]


def _drop_redundant(source: SafetensorsFolder, config: ModelConfig) -> None:
    """Forget tensors that carry nothing: rotary frequencies, and a tied head saved twice."""
    for name in [n for n in source.shapes if n.endswith("rotary_emb.inv_freq")]:
        del source.shapes[name]
    both = {"lm_head.weight", "model.embed_tokens.weight"} <= source.shapes.keys()
    if config.tied_embeddings and both:
        head, embedding = source.read("lm_head.weight"), source.read("model.embed_tokens.weight")
        if not torch.equal(head, embedding):
            raise WeightFileError(
                "the config ties lm_head.weight to model.embed_tokens.weight, but the file holds "
                "two different tensors. Set tie_word_embeddings to false in config.json."
            )
        del source.shapes["lm_head.weight"]


def _load_gguf(path: Path, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    source = GGUFFile(path)
    config = gguf_config(source)
    plan = _plan(config, GGUF_MODEL, GGUF_BLOCK, "blk.{}.")

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            return _halves(tensor, config.head_dim)
        return tensor

    return _build(config, plan, source, read, dtype, device)


def _halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of q or k, (heads · D, C), from rotated neighbors to rotated halves.

    GGUF's llama layout pairs rows 0 and 1, 2 and 3, ...; kvbook's rope pairs i and i + D/2. For
    D = 4 the rows of a head in the file belong to places 0, 2, 1, 3.
    """
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(rows.shape)


Part = tuple[str, tuple[int, ...]]  # a tensor of the file, and the shape that it must have


def _plan(
    config: ModelConfig, model: dict[str, list[str]], block: dict[str, list[str]], prefix: str
) -> dict[str, list[Part]]:
    """For each parameter of the model, the parts of the file that make it up, in order."""
    C, F = config.d_model, config.d_mlp
    shapes: dict[str, list[tuple[int, ...]]] = {
        "attention_norm.weight": [(C,)],
        "mlp_norm.weight": [(C,)],
        "mlp.gate_up.weight": [(F, C), (F, C)],
        "mlp.down.weight": [(C, F)],
        **(_attention_shapes(config) if config.latent is None
           else _latent_shapes(config, config.latent)),
    }
    plan = {
        f"blocks.{layer}.{name}": [
            (prefix.format(layer) + part, shape)
            for part, shape in zip(block[name], parts, strict=True)
        ]
        for layer in range(config.n_layers)
        for name, parts in shapes.items()
    }
    table = (config.vocab_size, C)
    plan["embedding.weight"] = [(model["embedding.weight"][0], table)]
    plan["norm.weight"] = [(model["norm.weight"][0], (C,))]
    if not config.tied_embeddings:
        plan["head.weight"] = [(model["head.weight"][0], table)]
    return plan


def _attention_shapes(config: ModelConfig) -> dict[str, list[tuple[int, ...]]]:
    C, D = config.d_model, config.head_dim
    q, kv = config.n_heads * D, config.n_kv_heads * D
    shapes: dict[str, list[tuple[int, ...]]] = {
        "attention.qkv.weight": [(q, C), (kv, C), (kv, C)],
        "attention.output.weight": [(C, q)],
    }
    if config.qkv_bias:
        shapes["attention.qkv.bias"] = [(q,), (kv,), (kv,)]
    if config.qk_norm:
        shapes["attention.q_norm.weight"] = shapes["attention.k_norm.weight"] = [(D,)]
    return shapes


def _latent_shapes(
    config: ModelConfig, latent: LatentConfig
) -> dict[str, list[tuple[int, ...]]]:
    C, H, R = config.d_model, config.n_heads, latent.kv_rank
    shapes: dict[str, list[tuple[int, ...]]] = {
        "attention.query.weight": [(H * config.head_dim, latent.q_rank or C)],
        "attention.latent_down.weight": [(R + latent.rope_dim, C)],
        "attention.latent_norm.weight": [(R,)],
        "attention.latent_up.weight": [(H * (latent.nope_dim + latent.value_dim), R)],
        "attention.output.weight": [(C, H * latent.value_dim)],
    }
    if latent.q_rank is not None:
        shapes["attention.query_down.weight"] = [(latent.q_rank, C)]
        shapes["attention.query_norm.weight"] = [(latent.q_rank,)]
    return shapes


def _build(
    config: ModelConfig,
    plan: dict[str, list[Part]],
    source: WeightSource,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Transformer:
    """Check the source against the plan, then copy it part by part into a new model."""
    _check(source.shapes, [part for parts in plan.values() for part in parts])
    with torch.device("meta"):  # neither memory nor random numbers for weights to be replaced
        model = Transformer(config, dtype, "meta")
    model.rope = Rope(config)
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    for name, parts in plan.items():
        start = 0
        for part, shape in parts:
            parameters[name][start : start + shape[0]].copy_(read(part))
            start += shape[0]
    return model.eval()


def _check(found: dict[str, tuple[int, ...]], wanted: Iterable[Part]) -> None:
    expected = dict(wanted)
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshapen = [
        f"{name} has shape {found[name]}, the config needs {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    complaints = [
        f"{title}: {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if names[5:] else "")
        for title, names in (
            ("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen)
        )
        if names
    ]  # fmt: skip
    if complaints:
        raise WeightFileError(
            f"the weights do not fit the configuration. {'; '.join(complaints)}. Fetch the weights "
            "and config.json of the same model again."
        )
