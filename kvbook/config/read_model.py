"""From a config.json to the numbers that a model is built from.

Knows: the supported architectures, what each leaves to its class, what is refused. Does not know:
how rotary positions are spelled, tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbook.config.config_file import content_of
from kvbook.config.family_defaults import with_defaults
from kvbook.config.latent_switch import latents_switched
from kvbook.config.parts import LatentConfig
from kvbook.config.read_rope import rope_scaling, rope_theta
from kvbook.config.spellings import Fields, flag
from kvbook.config.unread_fields import refuse_unread
from kvbook.errors import UnsupportedModelError

# model_type in config.json -> which optional parts the architecture has.
ARCHITECTURES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "mistral": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
    "deepseek_v2": {"qkv_bias": False, "qk_norm": False},
    "deepseek_v3": {"qkv_bias": False, "qk_norm": False},
}
LATENT = ("deepseek_v2", "deepseek_v3")  # those whose heads share one latent (MLA)

# What the class of a family takes where a config leaves a field out, beside what shapes its cache.
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": 1536, "n_routed_experts": 64, "first_k_dense_replace": 0},
    "deepseek_v3": {"q_lora_rank": 1536, "n_routed_experts": 256, "first_k_dense_replace": 3},
}


def model_fields(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``ModelConfig``, from a ``config.json`` or its content."""
    stated = content_of(source)
    kind = stated.get("model_type")
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"model_type {kind!r} is not supported; kvbook builds {', '.join(ARCHITECTURES)}. "
            "Pick a model of one of these families."
        )
    fields = Fields(with_defaults({**CLASS_DEFAULTS.get(kind, {}), **stated}))
    fields.idle(*(set(fields) - set(stated)))  # a default not asked for is no field
    refuse_unsupported(fields, kind)
    latent = latent_of(fields) if kind in LATENT else None
    n_heads = need(fields, "num_attention_heads")
    kv_heads = fields.get("num_key_value_heads")
    arguments = {
        "vocab_size": need(fields, "vocab_size"),
        "d_model": need(fields, "hidden_size"),
        "n_layers": need(fields, "num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": n_heads if kv_heads is None or latent is not None else kv_heads,
        "head_dim": head_dim(fields) if latent is None else latent.nope_dim + latent.rope_dim,
        "d_mlp": need(fields, "intermediate_size"),
        "max_positions": need(fields, "max_position_embeddings"),
        "norm_eps": fields.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(fields),
        "rope_scaling": rope_scaling(fields, scores=kind in LATENT),
        "tied_embeddings": flag(fields, "tie_word_embeddings"),
        **ARCHITECTURES[kind],
        "window": window_of(fields, kind),
        "latent": latent,
    }
    fields.idle(*PREDICTION)
    refuse_unread(fields)
    return arguments


# Layers that predict further tokens are not part of the model that is built.
PREDICTION = ("num_nextn_predict_layers", "num_mtp_layers")


def need(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"the config has no {name!r}; it is needed to build the model")
    return fields[name]


def refuse_unsupported(fields: Fields, kind: str) -> None:
    """Parts that kvbook does not build, by name."""
    if latents_switched(fields) not in (None, kind in LATENT):
        raise UnsupportedModelError(
            f"use_mla {fields['use_mla']} is not supported for {kind}; kvbook builds latents in "
            f"{' and '.join(LATENT)}, and there always"
        )
    if fields.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"hidden_act {fields['hidden_act']!r} is not supported; kvbook's MLP is SwiGLU ('silu')"
        )
    for name in ("attention_bias", "mlp_bias"):
        if fields.get(name):
            raise UnsupportedModelError(
                f"{name}=true is not supported; kvbook knows biases on q, k and v only (Qwen2)"
            )


def head_dim(fields: Fields) -> int:
    if fields.get("head_dim") is not None:
        return fields["head_dim"]
    d_model, n_heads = need(fields, "hidden_size"), need(fields, "num_attention_heads")
    if d_model % n_heads:
        raise ValueError(
            f"head_dim is missing and hidden_size {d_model} is not a multiple of "
            f"num_attention_heads {n_heads}; add head_dim to the config"
        )
    return d_model // n_heads


def latent_of(fields: Fields) -> LatentConfig:
    layers, dense = need(fields, "num_hidden_layers"), fields.get("first_k_dense_replace") or 0
    if fields.get("n_routed_experts") and dense < layers:
        raise UnsupportedModelError(
            f"layers {dense} to {layers - 1} are mixtures of {fields['n_routed_experts']} experts, "
            "which is not supported; allowed: dense layers only (first_k_dense_replace of at "
            "least num_hidden_layers, or no n_routed_experts)"
        )
    fields.idle("num_key_value_heads", "head_dim")  # every head has keys of its own
    return LatentConfig(
        q_rank=fields.get("q_lora_rank"),
        kv_rank=need(fields, "kv_lora_rank"),
        nope_dim=need(fields, "qk_nope_head_dim"),
        rope_dim=need(fields, "qk_rope_head_dim"),
        value_dim=need(fields, "v_head_dim"),
    )


def window_of(fields: Fields, kind: str) -> int | tuple[int | None, ...] | None:
    """W in keys including self; ``sliding_window`` in a config counts the same way."""
    window = fields.get("sliding_window")
    if not fields.get("use_sliding_window", kind in ("llama", "mistral")):
        window = None
    named = fields.get("layer_types")
    if named is None:
        named = layer_types(fields, kind)
    elif kind in LATENT and "sliding_attention" in named:
        raise UnsupportedModelError(
            f"layer_types has sliding_attention, and {kind} has no windowed layers; allowed: "
            "full_attention"
        )
    else:
        check_layer_types(named, need(fields, "num_hidden_layers"), window)
    fields.idle("max_window_layers")
    windows = tuple(window if name == "sliding_attention" else None for name in named)
    return windows if len(set(windows)) > 1 else next(iter(windows), None)


def check_layer_types(named: list[str], layers: int, window: int | None) -> None:
    unknown = sorted(set(named) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"layer_types {unknown} are not supported; allowed: full_attention and "
            "sliding_attention"
        )
    if len(named) != layers:
        raise ValueError(
            f"layer_types lists {len(named)} layers, but num_hidden_layers is {layers}; list each "
            "layer once"
        )
    if window is None and "sliding_attention" in named:
        raise ValueError(
            "layer_types has sliding_attention, but the config sets no window that is in use; set "
            "sliding_window (and use_sliding_window), or name every layer full_attention"
        )


def layer_types(fields: Fields, kind: str) -> list[str]:
    """What a config without ``layer_types`` means.

    Mistral's layers are all windowed, Qwen's from ``max_window_layers`` on, others' not at all.
    """
    layers = need(fields, "num_hidden_layers")
    first = {"mistral": 0, "qwen2": None, "qwen3": None}.get(kind, layers)
    full = need(fields, "max_window_layers") if first is None else first
    return ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]
