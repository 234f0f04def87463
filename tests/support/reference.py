"""Tiny random models of the ``transformers`` library, as the reference for parity.

The library computes norms and rotary angles in float32 even for a float64 model. ``in_float64``
replaces these two by the same formulas without the upcast, so that the comparison can be exact.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
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
    """The model in float64, its two float32 upcasts replaced."""
    model = model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_norm, module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(_angles, module)
    return model


def _norm(self: nn.Module, x: Tensor) -> Tensor:
    return self.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.variance_epsilon)


def _angles(self: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    config = self.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = [slowed(f, config.rope_parameters) for f in _plain(width, config)]
    half = position_ids[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)
    whole = torch.cat([half, half], -1)
    return whole.cos(), whole.sin()


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
