"""What a config means when it leaves a field out: the defaults of each family's class.

Knows: the fields that shape a cache, per family of transformers. Does not know: how they are used.

A field that is there, even as null, wins over these tables. A test compares them with the classes.
"""

from collections.abc import Mapping
from typing import Any

from kvbook.config.latent_switch import SIZES_OF_LATENTS
from kvbook.config.spellings import HEAD_WIDTH, HEADS, KV_HEADS, LAYERS, PATTERN, WIDTH, WINDOW

ONE_SIZE = (LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, WINDOW, PATTERN)

# A config.json may leave out what equals the default of its family's class: Gemma 3 12B, for one,
# has no head_dim, and 3840 / 16 is not its width.
DEFAULTS: dict[str, dict[str, Any]] = {
    "afmoe": {"head_dim": 128, "sliding_window": 1024, "global_attn_every_n_layers": 4},
    "axk1": {"num_key_value_heads": 64},
    "axk2": {"num_key_value_heads": 32, "index_head_dim": 128},
    "bailing_hybrid": {
        "num_key_value_heads": 32, "layer_group_size": 6, "short_conv_kernel_size": 4,
    },
    "bamba": {
        "num_key_value_heads": 8, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
    },
    "bart": {"is_encoder_decoder": True},
    "beam": {
        "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "bigbird_pegasus": {"is_encoder_decoder": True},
    "bitnet": {"num_key_value_heads": 5},
    "blenderbot": {"is_encoder_decoder": True},
    "blenderbot-small": {"is_encoder_decoder": True},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "cohere2_moe": {"head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": 4},
    "cohere_compass_text": {"sliding_window": 4096},
    "cpmant": {"dim_head": 128},
    "cwm": {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192},
    "deepseek_v3": {"num_key_value_heads": 128},
    "deepseek_v32": {"num_key_value_heads": 128, "index_head_dim": 128},
    "deepseek_v4": {
        "num_key_value_heads": 1, "head_dim": 512, "sliding_window": 128, "index_head_dim": 128,
    },
    "dory": {
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
        "sliding_window_pattern": 4,
    },
    "dots1": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62},
    "dots3_note_text": {"num_key_value_heads": 128, "index_head_dim": 128},
    "emu3_text_model": {"num_key_value_heads": 8},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128},
    "ernie4_5_moe": {"num_key_value_heads": 4},
    "exaone": {"num_key_value_heads": 8},
    "exaone4": {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone_moe": {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon": {"multi_query": True},
    "falcon_h1": {
        "num_key_value_heads": 8, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_ssm": 1024,
    },
    "falcon_mamba": {"conv_kernel": 4, "state_size": 16, "expand": 2},
    "flint": {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma3n_text": {
        "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
        "num_kv_shared_layers": 15, "sliding_window_pattern": 5,
    },
    "gemma4_text": {
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512, "global_head_dim": 512,
        "sliding_window_pattern": 6,
    },
    "gemma4_unified_text": {
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "global_head_dim": 512,
        "sliding_window_pattern": 6,
    },
    "glm": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4_moe": {"num_key_value_heads": 8},
    "glm4_moe_lite": {"num_key_value_heads": 20},
    "glm_moe_dsa": {"num_key_value_heads": 64, "index_head_dim": 128},
    "gpt_bigcode": {"multi_query": True},
    "gpt_neo": {"window_size": 256},
    "gpt_oss": {
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    "granite_swa": {"num_key_value_heads": 4, "sliding_window": 128},
    "granitemoe_swa": {"sliding_window": 128},
    "granitemoehybrid": {
        "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 128,
        "mamba_d_head": "auto", "mamba_n_groups": 1,
    },
    "helium": {"num_key_value_heads": 20, "head_dim": 128},
    "hrm_text": {"head_dim": 128},
    "hy_v3": {"num_key_value_heads": 8, "head_dim": 128},
    "hy_v4": {"num_key_value_heads": 32, "index_head_dim": 128},
    "inkling2_loop_text": {
        "num_key_value_heads": 8, "head_dim": 128, "sliding_window_size": 1024,
        "swa_num_key_value_heads": 8, "swa_head_dim": 128,
    },
    "inkling2_text": {
        "num_key_value_heads": 8, "head_dim": 128, "sliding_window_size": 1024,
        "swa_num_key_value_heads": 8, "swa_head_dim": 128,
    },
    "inkling_text": {
        "num_key_value_heads": 8, "head_dim": 128, "sliding_window_size": 512,
        "swa_num_key_value_heads": 16, "swa_head_dim": 128,
    },
    "internlm3": {"num_key_value_heads": 2, "head_dim": 128},
    "iquestcoder": {"num_key_value_heads": 8, "head_dim": 128},
    "jamba": {
        "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    },
    "jetmoe": {"num_key_value_heads": 16, "kv_channels": 128},
    "kimi_linear": {
        "num_key_value_heads": 32, "linear_conv_kernel_dim": 4, "linear_num_heads": 32,
        "linear_head_dim": 128,
    },
    "kolibri1": {
        "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513,
        "sliding_window_pattern": 5,
    },
    "laguna": {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 512},
    "lara_mini": {
        "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 512,
        "linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
    "lfm2": {"num_key_value_heads": 8, "conv_L_cache": 3},
    "lfm2_moe": {"num_key_value_heads": 8, "conv_L_cache": 3},
    "lfm3": {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 256, "conv_L_cache": 7},
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192},
    "mamba": {"conv_kernel": 4, "state_size": 16, "expand": 2},
    "mamba2": {"head_dim": 64, "n_groups": 8, "conv_kernel": 4, "state_size": 128, "expand": 2},
    "marian": {"is_encoder_decoder": True},
    "mbart": {"is_encoder_decoder": True},
    "mellum": {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 1024},
    "mimo_v2_flash": {
        "num_key_value_heads": 4, "head_dim": 192, "sliding_window": 129, "v_head_dim": 128,
        "sliding_window_pattern": 6,
    },
    "minicpm3": {"num_key_value_heads": 40},
    "minimax": {"num_key_value_heads": 8},
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
    "minimax_m3_vl_text": {"num_key_value_heads": 4, "head_dim": 128, "index_head_dim": 128},
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {"num_key_value_heads": 8, "head_dim": 128},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "mllama_text_model": {
        "num_key_value_heads": 8, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
    "modernbert-decoder": {"local_attention": 128},
    "moshi": {"sliding_window": 3000},
    "mvp": {"is_encoder_decoder": True},
    "nemotron_h": {
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2,
    },
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "olmo_hybrid": {"linear_conv_kernel_dim": 4},
    "pegasus": {"is_encoder_decoder": True},
    "phi4_multimodal": {"num_key_value_heads": 8},
    "phimoe": {"num_key_value_heads": 8},
    "plbart": {"is_encoder_decoder": True},
    "prophetnet": {"is_encoder_decoder": True},
    "qwen2": {
        "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16, "sliding_window": 4096, "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "qwen3": {
        "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096,
        "use_sliding_window": False, "max_window_layers": 28,
    },
    "qwen3_5_moe_text": {
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    },
    "qwen3_5_text": {
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    },
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window": False},
    "qwen3_next": {
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    },
    "qwen4_exp_text": {
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "recurrent_gemma": {
        "attention_window_size": 2048, "conv1d_width": 4,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "sarvam_moe": {"num_key_value_heads": 4, "head_dim": 64},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "use_sliding_window": False},
    "solar_open": {"num_key_value_heads": 8, "head_dim": 128},
    "stablelm": {"num_key_value_heads": 32},
    "starcoder2": {"num_key_value_heads": 2},
    "vaultgemma": {
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "whisper": {"max_source_positions": 1500, "is_encoder_decoder": True},
    "youtu": {"num_key_value_heads": 16},
    "zamba": {
        "num_key_value_heads": 16, "attn_layer_period": 6, "attn_layer_offset": 4,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    },
    "zamba2": {"mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2},
    "zaya": {"num_key_value_heads": 2, "head_dim": 128},
}  # fmt: skip

# The model's own sizes. A file always states them, unless the language model is nested in another:
# then even they may be left out.
SIZES: dict[str, dict[str, Any]] = {
    "cohere2": {"num_hidden_layers": 40, "hidden_size": 8192, "num_attention_heads": 64},
    "deepseek_v2": {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    "deepseek_v3": {
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    "dots3_note_text": {
        "num_hidden_layers": 46, "hidden_size": 5120, "num_attention_heads": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    "emu3_text_model": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "ernie4_5": {"num_hidden_layers": 18, "hidden_size": 1024, "num_attention_heads": 16},
    "gemma": {"num_hidden_layers": 28, "hidden_size": 3072, "num_attention_heads": 16},
    "gemma2": {"num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8},
    "gemma3_text": {"num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8},
    "gemma3n_text": {"num_hidden_layers": 35, "hidden_size": 2048, "num_attention_heads": 8},
    "gemma4_text": {"num_hidden_layers": 30, "hidden_size": 2304, "num_attention_heads": 8},
    "gemma4_unified_text": {"num_hidden_layers": 30, "hidden_size": 2304, "num_attention_heads": 8},
    "glm4": {"num_hidden_layers": 40, "hidden_size": 4096, "num_attention_heads": 32},
    "glm4_moe": {"num_hidden_layers": 46, "hidden_size": 4096, "num_attention_heads": 96},
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt_oss": {"num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64},
    "granite": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "hyperclovax": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "inkling_text": {"num_hidden_layers": 66, "hidden_size": 6144, "num_attention_heads": 64},
    "lfm2": {"num_hidden_layers": 32, "hidden_size": 2560, "num_attention_heads": 32},
    "llama": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "llama4_text": {"num_hidden_layers": 48, "hidden_size": 5120, "num_attention_heads": 40},
    "minimax_m3_vl_text": {"num_hidden_layers": 60, "hidden_size": 6144, "num_attention_heads": 64},
    "ministral3": {"num_hidden_layers": 34, "hidden_size": 4096, "num_attention_heads": 32},
    "mistral": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "mixtral": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "mllama_text_model": {"num_hidden_layers": 40, "hidden_size": 4096, "num_attention_heads": 32},
    "olmo2": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "opt": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "persimmon": {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 64},
    "phi3": {"num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 32},
    "qwen2": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "qwen2_moe": {"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16},
    "qwen3": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "qwen3_5_moe_text": {"num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 16},
    "qwen3_5_text": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 16},
    "qwen3_moe": {"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32},
    "qwen3_next": {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16},
    "qwen4_exp_text": {"num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 16},
    "smollm3": {"num_hidden_layers": 36, "hidden_size": 2048, "num_attention_heads": 16},
}  # fmt: skip

# The language model inside a model of several modalities, where it does not name its own family.
PARTS = {
    "dots3_note": "dots3_note_text",
    "emu3": "emu3_text_model",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}

# Families that transformers reads and that have nothing to say above.
PLAIN = (
    "apertus", "apertus1p5_text", "arcee", "aria_text", "biogpt", "bloom", "codegen", "cohere",
    "ctrl", "dbrx", "deepseek_v2", "diffllama", "doge", "flex_olmo", "gpt-sw3", "gpt2", "gpt_neox",
    "gpt_neox_japanese", "gptj", "granite", "granitemoe", "granitemoeshared", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "hyperclovax", "jais2", "llama", "longcat_flash", "mpt",
    "nanochat", "nemotron", "olmo", "olmo2", "olmoe", "openai-gpt", "opt", "persimmon", "phi",
    "phi3", "sarvam_mla", "trocr", "xglm",
)  # fmt: skip

# Families whose layers are full unless layer_types names them, whatever window the file states.
FULL_UNLESS_NAMED = (
    "llama", "cohere_compass_text", "deepseek_v2", "deepseek_v3", "granitemoe", "laguna",
    "mellum", "minimax", "qwen3_next",
)  # fmt: skip


# OpenAI's own files name no family; together these fields are of no other.
GPT_OSS_MARKS = ("experts_per_token", "swiglu_limit", "rope_ntk_alpha", "initial_context_length")


def family(fields: Mapping[str, Any]) -> str:
    """The family whose defaults hold."""
    if fields.get("model_type") is None and all(fields.get(name) for name in GPT_OSS_MARKS):
        return "gpt_oss"
    kind = str(fields.get("model_type"))
    return PARTS.get(kind, kind)


def known(name: str) -> bool:
    """Whether the defaults of this family are known here."""
    return name in DEFAULTS or name in PLAIN


def with_defaults(fields: Mapping[str, Any], nested: bool = False) -> dict[str, Any]:
    """The fields, with those of the family's defaults that the config leaves out.

    A default gives way to its size under any name. ``nested``: the fields stood in an object
    inside, which may leave out the sizes too.
    """
    kind = family(fields)
    defaults = {**(SIZES.get(kind, {}) if nested else {}), **DEFAULTS.get(kind, {})}
    if fields.get("use_mla") is False:  # then the class asks for none of these
        defaults = {name: defaults[name] for name in defaults if name not in SIZES_OF_LATENTS}
    stated = {name for names in ONE_SIZE if any(each in fields for each in names) for name in names}
    return {**{name: defaults[name] for name in defaults if name not in stated}, **fields}
