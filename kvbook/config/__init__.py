"""The shape of a model and how config files spell it: no tensors, no torch."""

from kvbook.config.model import ARCHITECTURES, LATENT, LLAMA_3_8B, ModelConfig
from kvbook.config.parts import SCALINGS, LatentConfig, RopeScaling

__all__ = [
    "ARCHITECTURES",
    "LATENT",
    "LLAMA_3_8B",
    "SCALINGS",
    "LatentConfig",
    "ModelConfig",
    "RopeScaling",
]
