"""The shape of a model, as numbers.

Knows: what a decoder-only transformer of the Llama family needs to be built, and how a Hugging
Face ``config.json`` spells it. Does not know: tensors, weights, caches.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbook.errors import UnsupportedModelError

# model_type in config.json -> which optional parts the architecture has.
ARCHITECTURES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "mistral": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}


# rope_type in config.json -> the fields of RopeScaling, after the kind, in order.
SCALINGS = {
    "linear": ["factor"],
    "llama3": [
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ],
}


@dataclass(frozen=True)
class RopeScaling:
    """Changes to the rotary frequencies that do not depend on the length of the text.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides only the slow ones:
    wavelengths above ``original_positions / low`` by ``factor``, those below
    ``original_positions / high`` not at all, and the ones between by a blend.
    """

    kind: str
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise UnsupportedModelError(
                f"rope scaling {self.kind!r} is not supported; allowed: default, "
                f"{', '.join(SCALINGS)}. A scaling that depends on the current length would also "
                "change keys that are already cached."
            )
        if not self.factor >= 1:
            raise ValueError(f"the factor of a rope scaling must be at least 1, got {self.factor}")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model. The letters in brackets are the book's notation.

    Example: SmolLM2-135M has 30 layers, 9 query heads over 3 KV heads of width 64.

    >>> ModelConfig(vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3,
    ...             head_dim=64, d_mlp=1536).group
    3
    """

    vocab_size: int  # V
    d_model: int  # C
    n_layers: int  # L
    n_heads: int  # H
    n_kv_heads: int  # Hkv
    head_dim: int  # D
    d_mlp: int  # F
    max_positions: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None  # W, in keys visible including self

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim",
                     "d_mlp", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} query heads over "
                f"{self.n_kv_heads} KV heads; allowed here: any divisor of {self.n_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 (the token itself), got {self.window}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head: H / Hkv."""
        return self.n_heads // self.n_kv_heads

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> "ModelConfig":
        """Read a Hugging Face ``config.json`` (a path, or its content as a mapping).

        Raises ``UnsupportedModelError`` for an architecture, an activation, a bias or a rotary
        scaling that kvbook does not implement, and ``ValueError`` for a missing field.
        """
        fields = source if isinstance(source, Mapping) else json.loads(Path(source).read_text())
        kind = fields.get("model_type")
        if kind not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"model_type {kind!r} is not supported; kvbook builds {', '.join(ARCHITECTURES)}. "
                "Pick a model of one of these families."
            )
        _refuse_unsupported(fields)
        d_model, n_heads = _need(fields, "hidden_size"), _need(fields, "num_attention_heads")
        head_dim = fields.get("head_dim")
        if head_dim is None:
            if d_model % n_heads:
                raise ValueError(
                    f"head_dim is missing and hidden_size {d_model} is not a multiple of "
                    f"num_attention_heads {n_heads}; add head_dim to the config"
                )
            head_dim = d_model // n_heads
        rope = _rope_fields(fields)
        part = ARCHITECTURES[kind]
        return cls(
            vocab_size=_need(fields, "vocab_size"),
            d_model=d_model,
            n_layers=_need(fields, "num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=fields.get("num_key_value_heads", n_heads),
            head_dim=head_dim,
            d_mlp=_need(fields, "intermediate_size"),
            max_positions=_need(fields, "max_position_embeddings"),
            norm_eps=fields.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            rope_scaling=_rope_scaling(rope),
            tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=part["qkv_bias"],
            qk_norm=part["qk_norm"],
            window=_window(fields, kind),
        )


def _need(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"the config has no {name!r}; it is needed to build the model")
    return fields[name]


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"hidden_act {fields['hidden_act']!r} is not supported; kvbook's MLP is SwiGLU ('silu')"
        )
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {fields['partial_rotary_factor']} is not supported; kvbook "
            "rotates whole heads (1.0)"
        )
    for name in ("attention_bias", "mlp_bias"):
        if fields.get(name):
            raise UnsupportedModelError(
                f"{name}=true is not supported; kvbook knows biases on q, k and v only (Qwen2)"
            )


def _rope_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in one place: newer configs nest them, older ones keep two fields."""
    nested = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = nested.get("rope_theta", fields.get("rope_theta", 10_000.0))
    return {**nested, "rope_theta": theta}


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    return RopeScaling(kind, *(_need(rope, name) for name in SCALINGS.get(kind, ())))


def _window(fields: Mapping[str, Any], kind: str) -> int | None:
    """W in keys including self; ``sliding_window`` in a config counts the same way."""
    window = fields.get("sliding_window")
    if window is None or not fields.get("use_sliding_window", kind == "mistral"):
        return None
    types = set(fields.get("layer_types") or _layer_types(fields, kind))
    if types == {"full_attention"}:
        return None
    if types != {"sliding_attention"}:
        raise UnsupportedModelError(
            f"layers of several attention kinds are not supported, got {sorted(types)}; allowed: "
            "all full or all sliding"
        )
    return int(window)


def _layer_types(fields: Mapping[str, Any], kind: str) -> list[str]:
    """What a config without ``layer_types`` means: Qwen leaves its first layers full."""
    full = 0 if kind == "mistral" else int(fields.get("max_window_layers", 28))
    layers = range(_need(fields, "num_hidden_layers"))
    return ["full_attention" if layer < full else "sliding_attention" for layer in layers]


# A well-known shape to put numbers to: Llama-3-8B (its config.json; Meta, 2024).
LLAMA_3_8B = ModelConfig(
    vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
    d_mlp=14_336, max_positions=8192, rope_theta=500_000.0, tied_embeddings=False,
)  # fmt: skip
