"""Every decoder family that the pinned transformers builds, made tiny, and what its cache holds.

A family's own default config is shrunk by name: each size below replaces the default of that
name. What that leaves impossible is mended in ``MENDED``.
"""

import json
import logging
import warnings
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TOKENS, WINDOW = 8, 3

SIZES: dict[str, int] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 16, "max_position_embeddings": 64, "num_key_value_heads": 2,
    "head_dim": 8, "n_layer": 4, "n_head": 4, "n_embd": 32, "n_layers": 4, "n_heads": 4,
    "d_model": 32, "n_positions": 64, "num_layers": 4, "encoder_layers": 4, "decoder_layers": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "ffn_dim": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "kv_lora_rank": 16, "q_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 2, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_expand": 2, "sliding_window": WINDOW,
    "sliding_window_size": WINDOW, "attention_window_size": WINDOW, "attention_chunk_size": WINDOW,
    "index_head_dim": 14, "index_n_heads": 2, "index_topk": 4, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4, "linear_num_heads": 4, "linear_head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "shared_intermediate_size": 8, "n_shared_experts": 1,
    "ffn_hidden_size": 16, "expert_ffn_hidden_size": 8, "n_inner": 16, "word_embed_proj_dim": 32,
    "ssm_state_size": 6, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1,
    "conv_kernel": 4, "max_seq_len": 64, "intermediate_size_mlp": 16, "moe_num_experts": 4,
    "rotary_dim": 4, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32,
    "altup_num_inputs": 2, "laurel_rank": 4, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 1, "swa_head_dim": 6, "num_kv_shared_layers": 1,
    "decoder_start_token_id": 1, "kv_channels": 8, "dim_head": 8, "state_size": 6,
    "num_experts_per_token": 2, "moe_topk": 2, "zero_expert_num": 2,
    "num_heads": 4, "attention_heads": 4,
    "unpadded_vocab_size": 32, "max_source_positions": 8, "num_encoder_layers": 4,
    "num_decoder_layers": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "n_input_layers": 1, "n_output_layers": 1, "lru_width": 32, "d_rel": 4,
    "linear_attn_head_dim": 8, "hc_mult": 2,
}  # fmt: skip

ROTATED_ONLY = ("head_dim",)  # classes with latents derive it
MLA_HEADS = {"num_key_value_heads": 4}
HYBRID = ["linear_attention", "full_attention"] * 2
MENDED: dict[str, dict[str, Any]] = {
    "axk1": MLA_HEADS,
    "axk2": MLA_HEADS,
    "bailing_hybrid": {**MLA_HEADS, "layer_types": HYBRID},
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {**MLA_HEADS, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v3": MLA_HEADS,
    "deepseek_v32": MLA_HEADS,
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "o_groups": 2, "o_lora_rank": 4, "num_key_value_heads": 1, "head_dim": 16,
    },
    "dots1": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1,
    },
    "dots3_note_text": {**MLA_HEADS, "mlp_layer_types": ["dense"] * 4},
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "glm_moe_dsa": MLA_HEADS,
    "gemma3n_text": {
        "num_hidden_layers": 6, "intermediate_size": 16, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2, "num_experts": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**MLA_HEADS, "layer_types": HYBRID, "mlp_layer_types": ["dense"] * 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 4},
    "longcat_flash": {**MLA_HEADS, "num_layers": 2, "head_dim": 4},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "minimax": {"layer_types": ["full_attention", "linear_attention", "linear_attention",
                                "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ministral": {"head_dim": 8},
    "modernbert-decoder": {"local_attention": 2 * WINDOW},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "youtu": MLA_HEADS,
    "zamba": {"attention_head_dim": 16, "num_hidden_layers": 8, "attention_hidden_size": 64},
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 16, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 16,
        "num_key_value_heads": 4, "num_query_groups": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
    "dory": {"num_hidden_layers": 4},
    "inkling2_text": {"vocab_size": 32},
}  # fmt: skip

# No decoders, or none that hands out a cache.
NOT_DECODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
    "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "xlm-roberta", "xlm-roberta-xl", "xmod", "xlm", "git", "reformer", "xlnet", "openai-gpt",
    "recurrent_gemma", "rwkv", "xlstm",
)  # fmt: skip
DECODERS = [name for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name not in NOT_DECODERS]


@cache
def class_defaults(family: str) -> dict[str, Any]:
    """The fields of the class's own config, as a file would hold them."""
    with quiet():
        config = AutoConfig.for_model(family)
    return json.loads(config.to_json_string(use_diff=False))


def tiny_fields(family: str) -> dict[str, Any]:
    """What a tiny model of the family is built from; a nested language model is nested here."""
    return {**shrunk(class_defaults(family)), **MENDED.get(family, {})}


def shrunk(defaults: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        if name in ROTATED_ONLY and "kv_lora_rank" in defaults:
            continue
        if name in SIZES and value and not isinstance(value, list | dict):
            fields[name] = SIZES[name]
        if name == "text_config" and isinstance(value, dict):
            inner = shrunk(value) | MENDED.get(value["model_type"], {})
            fields[name] = {"model_type": value["model_type"], **inner}
    if defaults.get("is_encoder_decoder"):
        fields["is_encoder_decoder"] = False
    return fields


def tiny_model(family: str) -> tuple[dict[str, Any], Any]:
    """Its whole config as a file would hold it, and the layers of its cache after one pass."""
    with quiet():
        config = AutoConfig.for_model(family, **tiny_fields(family))
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > 8_000_000:
            raise RuntimeError(f"not tiny: {size:,} parameters")
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            output = model(torch.ones(1, TOKENS, dtype=torch.long), use_cache=True)
    fields = json.loads(config.to_json_string(use_diff=False))
    found = output.past_key_values
    layers = list(getattr(found, "self_attention_cache", found).layers)
    return fields, layers + [Lightning(each) for each in getattr(found, "linear_cache", [])]


class Lightning:
    """A state that MiniMax's cache keeps beside its layers."""

    def __init__(self, state: Any) -> None:
        self.recurrent_states = {0: state if isinstance(state, torch.Tensor) else None}


class quiet:
    """Neither warnings nor the notes of missing kernels."""

    def __enter__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        logging.disable(logging.NOTSET)
        self._warnings.__exit__(None, None, None)


# ---- What a layer of transformers' cache holds


def kept_per_token(layer: Any) -> int:
    """Elements of one token: keys, values and index keys, each shape with the tokens before last.

    A tensor that serves as both is counted once.
    """
    names = ("keys", "values", "indexer_keys", "idx_keys")
    found = {id(t): t for name in names if (t := getattr(layer, name, None)) is not None}
    return sum(t.numel() // t.shape[-2] for t in found.values() if t.numel())


def tokens_held(layer: Any) -> int | None:
    keys = getattr(layer, "keys", None)
    return None if keys is None or not keys.numel() else int(keys.shape[-2])


def kept_state(layer: Any) -> int:
    """Elements per sequence, a convolution's oldest input left out."""
    convolutions = [t[..., 1:] for t in getattr(layer, "conv_states", {}).values() if t is not None]
    recurrent = [t for t in getattr(layer, "recurrent_states", {}).values() if t is not None]
    return sum(t.numel() for t in convolutions + recurrent)


def kept_compressed(layer: Any) -> int:
    """Elements of all entries of a compressed history."""
    entries = getattr(layer, "compressed_kv", {}).values()
    return sum(t.numel() for t in entries if t is not None)
