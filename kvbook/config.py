"""The shape of a model, as numbers.

Knows: what a decoder-only transformer of the Llama or DeepSeek family needs to be built, and how a
Hugging Face ``config.json`` spells it. Does not know: tensors, weights, caches.
"""

import json
import math
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
    "deepseek_v2": {"qkv_bias": False, "qk_norm": False},
    "deepseek_v3": {"qkv_bias": False, "qk_norm": False},
}
LATENT = ("deepseek_v2", "deepseek_v3")  # those whose heads share one latent (MLA)


# rope_type in config.json -> fields of RopeScaling and what the config calls them.
SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "original_positions": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "low": "beta_slow",
        "high": "beta_fast",
        "original_positions": "original_max_position_embeddings",
    },
}


@dataclass(frozen=True)
class RopeScaling:
    """Changes to the rotary frequencies that do not depend on the length of the text.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides only the slow ones:
    wavelengths above ``original_positions / low`` by ``factor``, those below
    ``original_positions / high`` not at all, and the ones between by a blend. ``yarn`` does the
    same with a blend that is even over the pairs of a head. (Peng et al. 2023, arXiv 2309.00071.)

    Keys and queries grow by ``amplitude`` when they are rotated; attention's scale is multiplied
    by ``score_factor``. Both offset the flatter scores of a longer text.
    """

    kind: str
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 8192
    amplitude: float = 1.0
    score_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise UnsupportedModelError(
                f"rope scaling {self.kind!r} is not supported; allowed: default, "
                f"{', '.join(SCALINGS)}. A scaling that depends on the current length would also "
                "change keys that are already cached."
            )
        if not self.factor >= 1:
            raise ValueError(f"the factor of a rope scaling must be at least 1, got {self.factor}")
        if not 0 < self.low < self.high:
            raise ValueError(
                "low must be above 0 and below high (both in turns over the original positions), "
                f"got {self.low} and {self.high}"
            )
        if not (self.amplitude > 0 and self.score_factor > 0):
            raise ValueError(
                "amplitude and score_factor of a rope scaling must be positive, got "
                f"{self.amplitude} and {self.score_factor}"
            )


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention. (DeepSeek-V2, arXiv 2405.04434, section 2.1.)

    A token is cached as one vector for all heads: a latent of ``kv_rank`` elements and a rotated
    key of ``rope_dim``. A head's key is ``nope_dim`` elements made from the latent, followed by
    that rotated key; its value is ``value_dim`` elements made from the latent.

    ``q_rank`` is the width between the two query projections, ``None`` for a single one. The
    norms of the two latents have an epsilon of their own: 1e-6 in the released models.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_sizes(self, "kv_rank", "nope_dim", "rope_dim", "value_dim")
        if self.q_rank is not None:
            _check_sizes(self, "q_rank")
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim must be even for rotary positions, got {self.rope_dim}")


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
    window: int | tuple[int | None, ...] | None = None  # W, for all layers or for each of them
    sinks: int = 0  # the first so many positions stay visible whatever the window
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads",
                     "head_dim", "d_mlp", "max_positions")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} query heads over "
                f"{self.n_kv_heads} KV heads; allowed here: any divisor of {self.n_heads}"
            )
        if self.latent is None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.latent is not None:
            self._check_latent(self.latent)
        self._check_windows()

    def _check_latent(self, latent: LatentConfig) -> None:
        width = latent.nope_dim + latent.rope_dim
        if self.head_dim != width:
            raise ValueError(
                f"with a latent, head_dim must be nope_dim + rope_dim = {width}, got "
                f"{self.head_dim}"
            )
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"with a latent, every head has its own keys: n_kv_heads must be {self.n_heads} "
                f"(n_heads), got {self.n_kv_heads}"
            )
        if self.qkv_bias or self.qk_norm:
            raise ValueError(
                "qkv_bias and qk_norm have no place beside a latent; leave both False"
            )

    def _check_windows(self) -> None:
        if isinstance(self.window, tuple) and len(self.window) != self.n_layers:
            raise ValueError(
                f"window lists {len(self.window)} layers, but the model has {self.n_layers}; give "
                "one value for each layer, or one for all"
            )
        for window in self.windows:
            if window is not None and not _is_count(window, 1):
                raise ValueError(
                    "a window must be an integer of at least 1 (the token itself), or None for "
                    f"no window, got {window!r}"
                )
        if not _is_count(self.sinks, 0):
            raise ValueError(f"sinks must be an integer of at least 0, got {self.sinks!r}")
        if self.sinks and all(window is None for window in self.windows):
            raise ValueError(
                f"sinks is {self.sinks}, but no layer has a window, so every position stays "
                "visible already; set a window, or leave sinks at 0"
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window: keys visible to a query, itself included; None means all."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.n_layers

    @property
    def cached_heads(self) -> int:
        """Heads that a cache stores per token: one for all when it stores a latent."""
        return self.n_kv_heads if self.latent is None else 1

    @property
    def cached_key_dim(self) -> int:
        """Width of a stored key; a latent and its rotated key count as one."""
        return self.head_dim if self.latent is None else self.latent.kv_rank + self.latent.rope_dim

    @property
    def cached_value_dim(self) -> int:
        """Width of a stored value: 0 for a latent, whose first kv_rank elements serve as one."""
        return self.head_dim if self.latent is None else 0

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def scale(self) -> float:
        """What attention multiplies scores by: 1 / √D, D being the width that a head compares.

        With a latent that width is nope_dim + rope_dim, whichever form computes the scores.
        """
        factor = 1.0 if self.rope_scaling is None else self.rope_scaling.score_factor
        return self.head_dim**-0.5 * factor

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
        latent = _latent(fields) if kind in LATENT else None
        n_heads = _need(fields, "num_attention_heads")
        head_dim = _head_dim(fields) if latent is None else latent.nope_dim + latent.rope_dim
        rope = _rope_fields(fields)
        part = ARCHITECTURES[kind]
        return cls(
            vocab_size=_need(fields, "vocab_size"),
            d_model=_need(fields, "hidden_size"),
            n_layers=_need(fields, "num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=fields.get("num_key_value_heads", n_heads),
            head_dim=head_dim,
            d_mlp=_need(fields, "intermediate_size"),
            max_positions=_need(fields, "max_position_embeddings"),
            norm_eps=fields.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            rope_scaling=_rope_scaling(rope, kind),
            tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=part["qkv_bias"],
            qk_norm=part["qk_norm"],
            window=_window(fields, kind),
            latent=latent,
        )


def _is_count(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _check_sizes(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not _is_count(value, 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


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


def _rope_scaling(rope: Mapping[str, Any], architecture: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "yarn":
        rope = {**rope, "beta_slow": rope.get("beta_slow") or 1.0,
                "beta_fast": rope.get("beta_fast") or 32.0}
    numbers = {ours: _need(rope, theirs) for ours, theirs in SCALINGS.get(kind, {}).items()}
    if kind == "yarn":
        numbers["amplitude"] = _yarn_amplitude(rope)
    if kind in SCALINGS and architecture in LATENT:
        numbers["score_factor"] = _score_factor(rope)
    return RopeScaling(kind, **numbers)


def _yarn_amplitude(rope: Mapping[str, Any]) -> float:
    """The factor on cosines and sines: named, a ratio of two temperatures, or the paper's."""
    if not rope.get("truncate", True):
        raise UnsupportedModelError(
            "yarn with truncate=false is not supported; allowed: true, or no such field"
        )
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, over, under = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    if over and under:
        return _temperature(factor, over) / _temperature(factor, under)
    return _temperature(factor, 1.0)


def _score_factor(rope: Mapping[str, Any]) -> float:
    """The factor on attention's scale, which DeepSeek's models take from ``mscale_all_dim``."""
    weight = rope.get("mscale_all_dim")
    return _temperature(rope["factor"], weight) ** 2 if weight else 1.0


def _temperature(factor: float, weight: float) -> float:
    """1 + 0.1 · weight · ln(factor). (YaRN, arXiv 2309.00071, section 3.4.)"""
    return 1.0 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0


def _head_dim(fields: Mapping[str, Any]) -> int:
    if fields.get("head_dim") is not None:
        return fields["head_dim"]
    d_model, n_heads = _need(fields, "hidden_size"), _need(fields, "num_attention_heads")
    if d_model % n_heads:
        raise ValueError(
            f"head_dim is missing and hidden_size {d_model} is not a multiple of "
            f"num_attention_heads {n_heads}; add head_dim to the config"
        )
    return d_model // n_heads


def _latent(fields: Mapping[str, Any]) -> LatentConfig:
    layers, dense = _need(fields, "num_hidden_layers"), fields.get("first_k_dense_replace") or 0
    if fields.get("n_routed_experts") and dense < layers:
        raise UnsupportedModelError(
            f"layers {dense} to {layers - 1} are mixtures of {fields['n_routed_experts']} experts, "
            "which is not supported; allowed: dense layers only (first_k_dense_replace of at "
            "least num_hidden_layers, or no n_routed_experts)"
        )
    return LatentConfig(
        q_rank=fields.get("q_lora_rank"),
        kv_rank=_need(fields, "kv_lora_rank"),
        nope_dim=_need(fields, "qk_nope_head_dim"),
        rope_dim=_need(fields, "qk_rope_head_dim"),
        value_dim=_need(fields, "v_head_dim"),
    )


def _window(fields: Mapping[str, Any], kind: str) -> int | tuple[int | None, ...] | None:
    """W in keys including self; ``sliding_window`` in a config counts the same way."""
    window = fields.get("sliding_window")
    if not fields.get("use_sliding_window", kind in ("llama", "mistral")):
        window = None
    named = fields.get("layer_types")
    if named is None:
        named = _layer_types(fields, kind)
    else:
        _check_layer_types(named, _need(fields, "num_hidden_layers"), window)
    windows = tuple(window if name == "sliding_attention" else None for name in named)
    return windows if len(set(windows)) > 1 else next(iter(windows), None)


def _check_layer_types(named: list[str], layers: int, window: int | None) -> None:
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


def _layer_types(fields: Mapping[str, Any], kind: str) -> list[str]:
    """What a config without ``layer_types`` means.

    Mistral's layers are all windowed, Qwen's from ``max_window_layers`` on, others' not at all.
    """
    layers = _need(fields, "num_hidden_layers")
    qwen = fields.get("max_window_layers", 28)
    full = {"mistral": 0, "qwen2": qwen, "qwen3": qwen}.get(kind, layers)
    return ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]


# A well-known shape to put numbers to: Llama-3-8B (its config.json; Meta, 2024).
LLAMA_3_8B = ModelConfig(
    vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
    d_mlp=14_336, max_positions=8192, rope_theta=500_000.0, tied_embeddings=False,
)  # fmt: skip
