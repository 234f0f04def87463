"""Right calls of what counts and reads: the rooms accounting and config, and the command line."""

from dataclasses import fields
from typing import Any

import kvbook.accounting as accounting
from kvbook import cli
from kvbook.accounting import (
    FORMATS,
    POLICIES,
    PRESETS,
    CacheGeometry,
    CacheSize,
    Format,
    Hardware,
    Kept,
    Layer,
    Policy,
    Weights,
    cache_size,
    full_layer,
    gallery_model,
    pool_layout,
)
from kvbook.accounting.gguf_fields import geometry_of_gguf
from kvbook.cli.find import find_geometry, parse_override
from kvbook.config import LLAMA_3_8B, LatentConfig, ModelConfig, RopeScaling
from sweeps.good_calls import folder, good, simple
from sweeps.wrong_values import Good

LLAMA = gallery_model("llama-3-8b")
SIZE = cache_size(LLAMA.geometry, 100)
INT8 = FORMATS["int8"]
FULL = full_layer(8, 128, 128)
H100 = PRESETS["H100-SXM"]


def of_fields(thing: Any) -> dict[str, Any]:
    return {field.name: getattr(thing, field.name) for field in fields(thing)}


# ---- What layers keep

simple("Kept", Kept, name="keys", heads=8, width=128)
simple("Kept.heads_per_device", Kept("keys", 8, 128).heads_per_device, devices=2)
simple("Layer", Layer, **of_fields(FULL))
simple("Layer.tokens_held", FULL.tokens_held, tokens=5)
simple("Layer.entries_of", FULL.entries_of, tokens=5)
simple("Layer.tokens_kept_of", FULL.tokens_kept_of, tokens=5)
simple("Layer.with_index_keys", FULL.with_index_keys, width=8)
simple("full_layer", accounting.full_layer, kv_heads=8, key_width=128, value_width=128)
simple("window_layer", accounting.window_layer, window=4, kv_heads=8, key_width=128,
       value_width=128)  # fmt: skip
simple("latent_layer", accounting.latent_layer, rank=512, rope_width=64, heads=16, nope_width=128,
       value_width=128)  # fmt: skip
simple("recurrent_layer", accounting.recurrent_layer, state=(Kept("recurrent state", 4, 30),))
simple("CacheGeometry", CacheGeometry, **of_fields(LLAMA.geometry))
simple("CacheGeometry.from_hf", CacheGeometry.from_hf, source=dict(LLAMA.config), name="x",
       overrides={"num_key_value_heads": 4}, mtp=0, source_tokens=None)  # fmt: skip
simple("CacheGeometry.from_model", CacheGeometry.from_model, config=LLAMA_3_8B, name="x")
simple("CacheGeometry.count", LLAMA.geometry.count, kind="full")
simple("geometry_of_gguf", geometry_of_gguf, name="m", metadata={
    "general.architecture": "llama", "llama.block_count": 1, "llama.attention.head_count": 2,
    "llama.embedding_length": 8,
})  # fmt: skip


# ---- Bytes

simple("cache_size", cache_size, geometry=LLAMA.geometry, tokens=5, batch=1, dtype="bf16",
       block_size=16, devices=1, dp=1, cp=1)  # fmt: skip
simple("CacheSize", CacheSize, **of_fields(SIZE))
simple("CacheSize.layer_bytes", SIZE.layer_bytes, layer=FULL, tokens=5)
simple("CacheSize.slots_held", SIZE.slots_held, layer=FULL, tokens=5)
simple("CacheSize.slots_written", SIZE.slots_written, layer=FULL, tokens=5)
simple("CacheSize.slots_reserved", SIZE.slots_reserved, layer=FULL)
simple("storage_bytes", accounting.storage_bytes, layers=1, rows=1, heads=1, slots=1, key_width=64,
       value_width=64, keys="bf16", values="bf16", spare=0, tail_slots=0, tail="bf16")  # fmt: skip
simple("max_tokens", accounting.max_tokens, size=SIZE, budget=10**9, reserved=False)
simple("max_sequences", accounting.max_sequences, size=SIZE, budget=1, reserved=False)
simple("card_budget", accounting.card_budget, memory=10**12, utilization=1,
       weights=Weights.parse("8B@16"), reserve=0, devices=1)  # fmt: skip
simple("Weights", Weights, total_bytes=1, words="as given")
simple("Weights.parse", Weights.parse, text="8B@16")
simple("pool_layout", pool_layout, size=SIZE)
simple("PoolLayout.blocks", pool_layout(SIZE).blocks, size=SIZE)
simple("PoolLayout.tokens", pool_layout(SIZE).tokens, blocks=3)
simple("Policy", Policy, name="x", rule="y", who=("z: https://example.org",), count=lambda size: 1)
simple("Policy.bytes", POLICIES["cells"].bytes, size=SIZE)
simple("gallery_model", gallery_model, name="gpt2")


# ---- Formats and units

simple("Format", Format, name="x", bits=8, group=32, scale_bits=16, zero_bits=0, group_tokens=1,
       shared="")  # fmt: skip
simple("Format.with_group", INT8.with_group, group=32)
simple("Format.per_channel", INT8.per_channel, tokens=32)
simple("Format.data_bytes", INT8.data_bytes, width=32)
simple("Format.scale_bytes", INT8.scale_bytes, width=32, tokens=1)
simple("Format.zero_bytes", INT8.zero_bytes, width=32, tokens=1)
simple("Format.vector_bytes", INT8.vector_bytes, width=32)
simple("parse_format", accounting.parse_format, dtype="bf16")
simple("store_format", accounting.store_format, name="int8", cache="bf16")
simple("parse_bytes", accounting.parse_bytes, text="1B")
simple("parse_count", accounting.parse_count, text="1")
simple("format_bytes", accounting.format_bytes, size=1)


# ---- Operations, traffic, machines

simple("causal_pairs", accounting.causal_pairs, T=1, past=0, window=4)
simple("attention_flops", accounting.attention_flops, pairs=1, heads=1, key_width=1, value_width=1)
simple("step_flops", accounting.step_flops, config=LLAMA_3_8B, T=1, past=0, batch=1, logits=1)
simple("step_traffic", accounting.step_traffic, config=LLAMA_3_8B, T=1, past=0, batch=1,
       weights="bf16", cache="bf16")  # fmt: skip
simple("intensity", accounting.intensity, flops=1, moved_bytes=1)
simple("Hardware", Hardware, name="x", peak_flops={"float32": 1.0}, bandwidth=1.0, memory=1,
       source="s", provenance={})  # fmt: skip
simple("Hardware.peak", H100.peak, dtype="bf16")
simple("Hardware.ridge", H100.ridge, dtype="bf16")
simple("Hardware.bound", H100.bound, flops=1, moved_bytes=1, dtype="bf16")
simple("preset", accounting.preset, name="H100-SXM")


# ---- Shapes of models

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": 8,
    "d_mlp": 64,
}  # fmt: skip
LATENT = LatentConfig(q_rank=7, kv_rank=5, nope_dim=4, rope_dim=4, value_dim=3)
simple("ModelConfig", ModelConfig, **SHAPE, max_positions=64, norm_eps=1e-5, rope_theta=1e4,
       rope_scaling=None, tied_embeddings=True, qkv_bias=False, qk_norm=False, window=4, sinks=1,
       latent=LATENT)  # fmt: skip
simple("LatentConfig", LatentConfig, **of_fields(LATENT))
simple("RopeScaling", RopeScaling, kind="yarn", factor=2.0, low=1.0, high=4.0,
       original_positions=32, amplitude=1.0, score_factor=1.0)  # fmt: skip


@good("ModelConfig.from_hf")
def _() -> Good:
    return Good(ModelConfig.from_hf, {"source": folder() / "config.json"})


# ---- The command line

simple("main", cli.main, arguments=["size", "gpt2", "--tokens", "5", "--json"])
simple("find_geometry", find_geometry, model="gpt2", overrides=["n_head=12"])
simple("parse_override", parse_override, text="n_head=12")
