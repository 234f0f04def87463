"""Tiny random models of the ``transformers`` library, as the reference for parity.

The library computes norms and rotary angles in float32 even for a float64 model, and DeepSeek-V2's
rotation as well. ``in_float64`` replaces these by the same formulas without the conversion, so that
the comparison can be exact.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.deepseek_v2 import modeling_deepseek_v2

# Small, and no two sizes alike, so that a transposed or swapped tensor cannot fit by chance.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 100.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
# With these, one pair of the four keeps its frequency, one is blended and two are slowed.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Of four pairs, the first keeps its frequency, two are blended and the last is slowed. Unequal
# mscale and mscale_all_dim change the rotation and the scale by different factors.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 32,
}
DEEPSEEK_YARN_ROPE = {**YARN_ROPE, "mscale": 1.3, "mscale_all_dim": 0.7}
# Dense layers only. The width of a head is 6 + 8 for keys and 10 for values.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 3,
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def pattern(*layer_types: str) -> dict[str, Any]:
    """Fields of a Qwen config whose layers see 5 keys (LOCAL) or all (GLOBAL)."""
    return {
        "num_key_value_heads": 2,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 0,
    }


@dataclass(frozen=True)
class Case:
    """One architecture: the library's classes and what differs from ``SIZES``."""

    name: str
    config: type
    model: type
    changes: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    def build(self, seed: int = 0) -> PreTrainedModel:
        """A float32 model in evaluation mode with weights that hide nothing: see ``randomize``."""
        fields = {**SIZES, "rope_parameters": PLAIN_ROPE, "tie_word_embeddings": False}
        model = self.model(self.config(**{**fields, **self.changes})).eval()
        randomize(model, seed)
        return model


CASES = [
    Case("llama-mha", LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    Case("llama-gqa", LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 2}),
    Case("llama-mqa", LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    Case(
        "llama-tied", LlamaConfig, LlamaForCausalLM,
        {"num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    Case(
        "llama-linear", LlamaConfig, LlamaForCausalLM,
        {"num_key_value_heads": 2, "rope_parameters": LINEAR_ROPE},
    ),
    Case(
        "llama-llama3", LlamaConfig, LlamaForCausalLM,
        {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    ),
    Case(
        "llama-wide-heads", LlamaConfig, LlamaForCausalLM,
        {"num_key_value_heads": 2, "head_dim": 12},
    ),
    Case(
        "mistral-window", MistralConfig, MistralForCausalLM,
        {"num_key_value_heads": 2, "sliding_window": 5},
    ),
    Case(
        "mistral-full", MistralConfig, MistralForCausalLM,
        {"num_key_value_heads": 2, "sliding_window": None},
    ),
    Case("qwen2", Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 2}),
    Case(
        "qwen2-tied", Qwen2Config, Qwen2ForCausalLM,
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    Case(
        "qwen3", Qwen3Config, Qwen3ForCausalLM,
        {"num_key_value_heads": 2, "head_dim": 16},
    ),
    Case(
        "qwen3-tied", Qwen3Config, Qwen3ForCausalLM,
        {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    ),
    Case(
        "llama-yarn", LlamaConfig, LlamaForCausalLM,
        {"num_key_value_heads": 2, "rope_parameters": YARN_ROPE},
    ),
    # Two local layers to one global, and alternating layers, each with either kind first.
    Case(
        "qwen2-local-first", Qwen2Config, Qwen2ForCausalLM,
        pattern(LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL),
    ),
    Case(
        "qwen2-global-first", Qwen2Config, Qwen2ForCausalLM,
        pattern(GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL),
    ),
    Case(
        "qwen3-alternating", Qwen3Config, Qwen3ForCausalLM,
        {**pattern(LOCAL, GLOBAL, LOCAL, GLOBAL), "head_dim": 16},
    ),
    Case(
        "qwen3-alternating-global-first", Qwen3Config, Qwen3ForCausalLM,
        {**pattern(GLOBAL, LOCAL, GLOBAL, LOCAL), "head_dim": 16},
    ),
    Case("deepseek-v2", DeepseekV2Config, DeepseekV2ForCausalLM, LATENT),
    Case(
        "deepseek-v2-one-query-projection", DeepseekV2Config, DeepseekV2ForCausalLM,
        {**LATENT, "q_lora_rank": None},
    ),
    Case(
        "deepseek-v2-yarn", DeepseekV2Config, DeepseekV2ForCausalLM,
        {**LATENT, "rope_parameters": DEEPSEEK_YARN_ROPE},
    ),
    Case("deepseek-v3", DeepseekV3Config, DeepseekV3ForCausalLM, LATENT),
    Case(
        "deepseek-v3-halves", DeepseekV3Config, DeepseekV3ForCausalLM,
        {**LATENT, "rope_interleave": False},
    ),
    Case(
        "deepseek-v3-yarn", DeepseekV3Config, DeepseekV3ForCausalLM,
        {**LATENT, "rope_parameters": DEEPSEEK_YARN_ROPE},
    ),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Norm weights away from one, biases away from zero, logits that vary by more than 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            weight.copy_(1 + 0.3 * noise)
        elif weight.ndim == 1 or "embed_tokens" in name:
            weight.copy_(noise)
        else:
            weight.copy_(1.5 * noise / math.sqrt(weight.shape[1]))


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64, its conversions to float32 replaced."""
    model = model.double()
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = MethodType(_norm, module)
        if name.endswith("RotaryEmbedding"):
            module.forward = MethodType(_angles, module)
        if name == "DeepseekV2RotaryEmbedding":
            module.forward = MethodType(_complex_angles, module)
        if name == "DeepseekV2Attention":
            module.forward = MethodType(_deepseek_v2_attention, module)
    return model


def _norm(self: nn.Module, x: Tensor) -> Tensor:
    return self.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.variance_epsilon)


def _angles(self: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    half, amplitude = _turns(self, position_ids)
    whole = torch.cat([half, half], -1)
    return whole.cos() * amplitude, whole.sin() * amplitude


def _complex_angles(self: nn.Module, x: Tensor, position_ids: Tensor) -> Tensor:
    half, amplitude = _turns(self, position_ids)
    return torch.polar(torch.full_like(half, amplitude), half)


def _deepseek_v2_attention(self: nn.Module, *inputs: Any, **named: Any) -> Any:
    with mock.patch.object(modeling_deepseek_v2, "apply_rotary_emb", _turn_neighbors):
        return type(self).forward(self, *inputs, **named)


def _turn_neighbors(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Elements 0 and 1, 2 and 3, ... of (B, heads, T, D) turned by complex (B, T, D/2)."""
    pairs = [torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k)]
    q, k = (torch.view_as_real(pair * turns[:, None]).flatten(-2) for pair in pairs)
    return q, k


def _turns(rotary: nn.Module, position_ids: Tensor) -> tuple[Tensor, float]:
    """Angles (B, T, D/2) in float64, and the factor on their cosines and sines."""
    config = rotary.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    plain = _plain(width, config)
    if rope["rope_type"] == "yarn":
        frequencies, amplitude = yarn(plain, rope), yarn_amplitude(rope)
    else:
        frequencies, amplitude = [slowed(f, rope) for f in plain], 1.0
    angles = position_ids[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)
    return angles, amplitude


def _plain(width: int, config: Any) -> list[float]:
    theta = config.rope_parameters["rope_theta"]
    return [1.0 / theta ** (2 * pair / width) for pair in range(width // 2)]


def slowed(frequency: float, rope: dict[str, Any]) -> float:
    """The frequency after scaling, in terms of wavelengths as the Llama 3.1 release states it."""
    if rope["rope_type"] == "default":
        return frequency
    if rope["rope_type"] == "linear":
        return frequency / rope["factor"]
    wavelength = 2 * math.pi / frequency
    original, low, high = (
        rope[key]
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / rope["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def yarn(plain: list[float], rope: dict[str, Any]) -> list[float]:
    """Frequencies by YaRN: from whole pair ``first`` to ``last`` an even blend."""

    def pair_that_turns(times: float) -> float:
        wavelength = rope["original_max_position_embeddings"] / times
        return len(plain) * math.log(wavelength / (2 * math.pi), rope["rope_theta"])

    first = math.floor(pair_that_turns(rope["beta_fast"]))
    last = math.ceil(pair_that_turns(rope["beta_slow"]))
    assert 0 <= first < last < 2 * len(plain)  # no clipping: the cases are made so
    slow = [min(max((pair - first) / (last - first), 0.0), 1.0) for pair in range(len(plain))]
    return [f * ((1 - s) + s / rope["factor"]) for f, s in zip(plain, slow, strict=True)]


def yarn_amplitude(rope: dict[str, Any]) -> float:
    over, under = (
        1 + 0.1 * rope.get(name, default) * math.log(rope["factor"])
        for name, default in (("mscale", 1.0), ("mscale_all_dim", 0.0))
    )
    return over / under
