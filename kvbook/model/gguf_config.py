"""The shape of a llama model, from the metadata of a GGUF file.

Knows: how GGUF spells the fields of ``ModelConfig`` for the llama architecture. Does not know: how
a file is read, where its tensors go.

A field that changes what the model computes and that kvbook does not build is refused by name. So
is one that is not known here: it may be such a field.
"""

import math
from typing import Any

from kvbook.config import ModelConfig
from kvbook.errors import UnsupportedModelError, WeightFileError
from kvbook.model.gguf_file import GGUFFile

SIZES = {
    "n_layers": "block_count",
    "d_model": "embedding_length",
    "n_heads": "attention.head_count",
    "n_kv_heads": "attention.head_count_kv",
    "d_mlp": "feed_forward_length",
    "max_positions": "context_length",
}
NUMBERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
HEAD_DIMS = ("rope.dimension_count", "attention.key_length", "attention.value_length")
VOCABULARY = "vocab_size"
SCALING = "rope.scaling.type"
KNOWN = {*SIZES.values(), *NUMBERS, *HEAD_DIMS, VOCABULARY, SCALING}
LARGEST_SIZE = 2**31 - 1


def gguf_config(source: GGUFFile) -> ModelConfig:
    """The configuration of a llama model.

    Raises ``UnsupportedModelError`` for another architecture or for a field that kvbook does not
    build, and ``WeightFileError`` for a field that is missing, of a wrong type or at odds with
    another.
    """
    fields = _llama_fields(source)
    sizes = {ours: _size(source, fields, theirs) for ours, theirs in SIZES.items()}
    table = source.shapes.get("token_embd.weight")
    if table is None:
        raise WeightFileError(f"{source.path} has no token_embd.weight. Fetch it again.")
    if sizes["n_layers"] > len(source.shapes):
        raise WeightFileError(
            f"{source.path} states {sizes['n_layers']:,} layers, but holds "
            f"{len(source.shapes):,} tensors. Fetch it again."
        )
    if sizes["d_model"] % sizes["n_heads"]:
        raise WeightFileError(
            f"{source.path} has an embedding_length of {sizes['d_model']} that its "
            f"{sizes['n_heads']} heads cannot share evenly. Fetch it again."
        )
    head_dim = sizes["d_model"] // sizes["n_heads"]
    stated = dict.fromkeys(HEAD_DIMS, head_dim) | {VOCABULARY: table[0]}
    for name, value in stated.items():
        if name in fields and fields[name] != value:
            raise UnsupportedModelError(
                f"{source.path} has llama.{name} = {fields[name]!r:.80}; kvbook builds {value} "
                "from its other sizes. Use the model's Hugging Face folder."
            )
    return ModelConfig(
        vocab_size=table[0],
        d_model=sizes["d_model"],
        n_layers=sizes["n_layers"],
        n_heads=sizes["n_heads"],
        n_kv_heads=sizes["n_kv_heads"],
        head_dim=head_dim,
        d_mlp=sizes["d_mlp"],
        max_positions=sizes["max_positions"],
        norm_eps=_number(source, fields, "attention.layer_norm_rms_epsilon"),
        rope_theta=_number(source, fields, "rope.freq_base"),
        tied_embeddings="output.weight" not in source.shapes,
    )


def _llama_fields(source: GGUFFile) -> dict[str, Any]:
    kind = source.metadata.get("general.architecture")
    if kind != "llama" or "rope_freqs.weight" in source.shapes:
        raise UnsupportedModelError(
            f"{source.path} holds architecture {kind!r:.80}; allowed: 'llama' with plain rotary "
            "frequencies. Use the model's Hugging Face folder."
        )
    fields = {
        key.removeprefix("llama."): value
        for key, value in source.metadata.items()
        if key.startswith("llama.")
    }
    unknown = sorted(fields.keys() - KNOWN)
    if unknown or fields.get(SCALING, "none") != "none":
        raise UnsupportedModelError(
            f"{source.path} sets llama fields that kvbook does not build: "
            f"{', '.join(unknown[:5]) or SCALING}; known are {', '.join(sorted(KNOWN))}. Use the "
            "model's Hugging Face folder."
        )
    return fields


def _size(source: GGUFFile, fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
        raise WeightFileError(
            f"{source.path} has llama.{name} = {value!r:.80}; it must be an integer from 1 to "
            f"{LARGEST_SIZE:,}. Fetch it again."
        )
    return value


def _number(source: GGUFFile, fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if type(value) is not float or not (value > 0 and math.isfinite(value)):
        raise WeightFileError(
            f"{source.path} has llama.{name} = {value!r:.80}; it must be a finite number above 0. "
            "Fetch it again."
        )
    return value
