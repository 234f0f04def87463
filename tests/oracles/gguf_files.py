"""Small GGUF files, written by the ``gguf`` package, for metadata that the real file never has."""

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from kvbook.model.transformer import Transformer

PLACES = {
    "attention_norm.weight": "attn_norm",
    "attention.output.weight": "attn_output",
    "mlp_norm.weight": "ffn_norm",
    "mlp.down.weight": "ffn_down",
}


def neighbors(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k as GGUF orders them: 0, D/2, 1, D/2 + 1, ... of every head."""
    width = len(rows) // heads
    order = [i // 2 + (i % 2) * width // 2 for i in range(width)]
    return torch.cat([head[order] for head in rows.split(width)])


def llama_tensors(model: Transformer) -> dict[str, Tensor]:
    """The weights of a model by GGUF's names, in GGUF's order of rows."""
    c = model.config
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    tensors = {"token_embd": model.embedding.weight, "output_norm": model.norm.weight}
    if not c.tied_embeddings:
        tensors["output"] = model.head.weight
    for layer, block in enumerate(model.blocks):
        parts = {name: block.get_parameter(ours) for ours, name in PLACES.items()}
        queries, keys, parts["attn_v"] = block.attention.qkv.weight.split([q, kv, kv])
        parts["attn_q"] = neighbors(queries, c.n_heads)
        parts["attn_k"] = neighbors(keys, c.n_kv_heads)
        parts["ffn_gate"], parts["ffn_up"] = block.mlp.gate_up.weight.chunk(2)
        tensors |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


def write_llama(
    path: Path, model: Transformer, alignment: int = 32, extra: dict[str, Any] | None = None
) -> Path:
    """A whole llama file in float32. ``extra`` adds or replaces metadata: a value, or None."""
    c = model.config
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    fields: dict[str, Any] = {
        "llama.block_count": c.n_layers,
        "llama.context_length": c.max_positions,
        "llama.embedding_length": c.d_model,
        "llama.feed_forward_length": c.d_mlp,
        "llama.attention.head_count": c.n_heads,
        "llama.attention.head_count_kv": c.n_kv_heads,
        "llama.rope.freq_base": c.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": c.norm_eps,
        **(extra or {}),
    }
    for name, value in fields.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    for name, tensor in llama_tensors(model).items():
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# 256 letters, one per byte, would be a whole byte-level vocabulary; these spell "abc ab" and the
# name of the control token.
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "c", "Ġ", "ab", "Ġab", *"<|end>"],
    "tokenizer.ggml.token_type": [3] + 12 * [1],
    "tokenizer.ggml.merges": ["a b", "Ġ ab"],
    "tokenizer.ggml.eos_token_id": 0,
}
