"""The instrument: tiny models of each family run in transformers, and their caches are looked at.

Known differences, each pinned below: transformers splits a latent into keys and values, keeps
W − 1 tokens of a window between passes, keeps k inputs of a convolution where k − 1 are enough,
and repeats the KV heads of a Falcon-40B before it caches them.
"""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layers import Layer

TOKENS, WINDOW = 8, 3
SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GQA = {**SMALL, "num_key_value_heads": 2}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
MLA = {
    **SMALL, "kv_lora_rank": 16, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 10, "num_key_value_heads": 4, "first_k_dense_replace": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 6,
    "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
ALTERNATING = ["linear_attention", "full_attention"] * 2

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("gpt2", {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 32,
                       "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}),
    "OPT": ("opt", {**SMALL, "ffn_dim": 16, "word_embed_proj_dim": 32}),
    "Llama": ("llama", {**GQA, "head_dim": 12}),
    "Mistral": ("mistral", {**GQA, "sliding_window": WINDOW}),
    "Mixtral": ("mixtral", {**GQA, **MOE}),
    "Qwen2": ("qwen2", {**GQA, "use_sliding_window": True, "sliding_window": WINDOW,
                        "max_window_layers": 2}),
    "Qwen3": ("qwen3", {**GQA, "head_dim": 24}),
    "Qwen3 MoE": ("qwen3_moe", {**GQA, **EXPERTS, "head_dim": 24}),
    "Gemma 2": ("gemma2", {**GQA, "head_dim": 12, "sliding_window": WINDOW}),
    "Gemma 3": ("gemma3_text", {**GQA, "num_hidden_layers": 7, "head_dim": 12,
                                "sliding_window": WINDOW}),
    "gpt-oss": ("gpt_oss", {**GQA, **MOE, "head_dim": 12, "sliding_window": WINDOW}),
    "Phi-3": ("phi3", {**GQA, "sliding_window": WINDOW}),
    "Falcon 7B": ("falcon", SMALL),
    "Command-R": ("cohere", GQA),
    "Command-R7B": ("cohere2", {**GQA, "sliding_window": WINDOW}),
    "DeepSeek-V2": ("deepseek_v2", MLA),
    "DeepSeek-V3": ("deepseek_v3", MLA),
    "DeepSeek-V3.2": ("deepseek_v32", {**MLA, "index_head_dim": 14, "index_n_heads": 2,
                                       "index_topk": 4}),
    "Jamba": ("jamba", {**GQA, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4,
                        "mamba_d_conv": 4, "mamba_expand": 2, "num_experts": 2,
                        "num_experts_per_tok": 1}),
    "Qwen3-Next": ("qwen3_next", {
        **GQA, **EXPERTS, "head_dim": 12, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 8}),
    "LFM2": ("lfm2", {**GQA, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}),
    "Bamba": ("bamba", {**GQA, **MAMBA2, "attn_layer_indices": [1]}),
    "Nemotron-H": ("nemotron_h", {
        **GQA, "head_dim": 12, "hybrid_override_pattern": "M-M*", "ssm_state_size": 6,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "conv_kernel": 4,
        "expand": 2}),
    "Granite 4": ("granitemoehybrid", {
        **GQA, **MAMBA2, **MOE, "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 8}),
    "Kimi-Linear": ("kimi_linear", {
        **MLA, "layer_types": ALTERNATING, "linear_head_dim": 8, "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(one_thread: None) -> Iterator[None]:
    """The reference notes on stderr that its fast kernels are missing, which is no matter here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def run(config: Any) -> list[Any]:
    """The layers of the cache after one pass over a text."""
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        output = model(torch.ones(1, TOKENS, dtype=torch.long), use_cache=True)
    return list(output.past_key_values.layers)


def numbers_per_token(layer: Any) -> int:
    """Elements that the layer keeps of one token."""
    kept = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    return sum(t.numel() // t.shape[-2] for t in kept if t is not None and t.numel())


def numbers_of_state(layer: Any) -> int:
    """Elements that the layer keeps per sequence, a convolution's oldest input left out."""
    convolutions = [t[..., 1:] for t in getattr(layer, "conv_states", {}).values() if t is not None]
    recurrent = [t for t in getattr(layer, "recurrent_states", {}).values() if t is not None]
    return sum(t.numel() for t in convolutions + recurrent)


def check(ours: Layer, theirs: Any) -> None:
    counted = sum(kept.heads * kept.width for kept in ours.per_token)
    assert counted == numbers_per_token(theirs)
    if ours.kind in ("full", "window"):
        keys, values = ours.per_token
        assert (keys.heads, keys.width) == (theirs.keys.shape[1], theirs.keys.shape[-1])
        assert (values.heads, values.width) == (theirs.values.shape[1], theirs.values.shape[-1])
    if ours.per_token:
        held = TOKENS if ours.window is None else ours.window - 1
        assert theirs.keys.shape[2] == held
    assert ours.state is not None
    assert sum(kept.heads * kept.width for kept in ours.state) == numbers_of_state(theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_what_the_config_says_is_what_the_model_keeps(name: str) -> None:
    kind, fields = MODELS[name]
    config = AutoConfig.for_model(kind, **fields)
    layers = run(config)
    for source in ({"model_type": kind, **fields}, config.to_dict()):
        geometry = CacheGeometry.from_hf(source)
        assert len(geometry.layers) == len(layers)
        for ours, theirs in zip(geometry.layers, layers, strict=True):
            check(ours, theirs)


@pytest.mark.filterwarnings("ignore")
def test_falcon_40b_needs_less_than_transformers_keeps() -> None:
    fields = {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}
    theirs = run(AutoConfig.for_model("falcon", **fields))[0]
    ours = CacheGeometry.from_hf({"model_type": "falcon", **fields}).layers[0]
    assert [kept.heads for kept in ours.per_token] == [2, 2]
    assert theirs.keys.shape[1] == 4
