"""Random models: kvbook's, with their weights written out, and transformers' where it has them."""

import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from oracles.reference import LLAMA3_ROPE, SIZES, YARN_ROPE, Case, in_float64, save
from oracles.toys import SMALL
from torch import Tensor
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
from transformers.utils import logging

from fuzz.written_out import Weights
from kvbook.config import LatentConfig, RopeScaling
from kvbook.model.experiment import attend_with, evaluate_with
from kvbook.model.latent import materialized
from kvbook.model.tiles import attend_by_tiles
from kvbook.model.transformer import Transformer
from kvbook.model.weights import load_folder

logging.disable_progress_bar()
logging.set_verbosity_error()
Fields = dict[str, Any]
LIBRARY: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "deepseek-v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek-v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
FAMILIES = ["any of kvbook", *LIBRARY]
# How a model computes what another way must give as well: not part of its config.
BY_TILES, MATERIALIZED = "tile", "materialized"


@dataclass(frozen=True)
class Built:
    """One model, three times."""

    model: Transformer
    weights: Weights
    library: PreTrainedModel | None  # float64

    def recomputed(self, tokens: list[int]) -> Tensor:
        """Logits (n, V) of one text by the model without a cache."""
        return self.model(torch.tensor([tokens]))[0]

    def by_the_library(self, tokens: list[int]) -> Tensor | None:
        if self.library is None:
            return None
        with torch.no_grad():
            return self.library(torch.tensor([tokens]), use_cache=False).logits[0]


_built: dict[str, Built] = {}  # the last few, by what they were built from


def build(family: str, config: Fields, seed: int) -> Built:
    """The same one for the same arguments."""
    key = repr((family, sorted(config.items()), seed))
    if key not in _built:
        if len(_built) == 32:
            _built.clear()
        _built[key] = _build(family, config, seed)
    return _built[key]


def _build(family: str, config: Fields, seed: int) -> Built:
    fields = {name: x for name, x in config.items() if name not in (BY_TILES, MATERIALIZED)}
    library = None
    if family in LIBRARY:
        library = Case(family, *LIBRARY[family], fields).build(seed)
        with tempfile.TemporaryDirectory() as folder:
            model = load_folder(save(library, Path(folder)), torch.float64)
        library = in_float64(library)
    else:
        model = random_weights(Transformer(replace(SMALL, **fields), torch.float64), seed)
    if BY_TILES in config:
        attend_with(model, attend_by_tiles(config[BY_TILES]))
    if config.get(MATERIALIZED):
        evaluate_with(model, materialized)
    return Built(model, Weights(model), library)


def random_weights(model: Transformer, seed: int) -> Transformer:
    """Sharp attention, norms away from 1: weights that hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            weight.copy_(1 + 0.3 * noise)
        elif weight.ndim == 1 or name == "embedding.weight":
            weight.copy_(noise)
        else:
            weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)
    return model


# ---- What is drawn


def draw_family(rnd: random.Random, exact: bool) -> str:
    """Where a store rounds, the library says nothing that the formulas do not."""
    return rnd.choice(list(LIBRARY)) if exact and rnd.random() < 0.4 else FAMILIES[0]


def draw_config(rnd: random.Random, family: str, by_tiles: bool) -> Fields:
    draw = draw_any if family == FAMILIES[0] else draw_library
    config = draw(rnd, family)
    if by_tiles:
        config[BY_TILES] = rnd.choice([1, 2, 5, 16])
    if ("latent" in config or "kv_lora_rank" in config) and rnd.random() < 0.5:
        config[MATERIALIZED] = True
    return config


def draw_any(rnd: random.Random, family: str) -> Fields:
    """Changes to ``toys.SMALL``. Widths of what is stored are multiples of 3, as the stores ask."""
    layers = rnd.choice([1, 2, 2, 3])
    heads = rnd.choice([1, 2, 3, 4, 6])
    fields: Fields = {
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": rnd.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": rnd.choice([6, 12]),
        "d_model": rnd.choice([8, 16]),
        "rope_theta": rnd.choice([20.0, 50.0, 10_000.0]),
        "max_positions": rnd.choice([20, 40, 64]),
        "tied_embeddings": rnd.random() < 0.3,
    }
    if rnd.random() < 0.3:
        rope = rnd.choice([4, 6])
        latent = LatentConfig(
            q_rank=rnd.choice([None, 7]), kv_rank=rnd.choice([5, 8]) if rope == 4 else 9,
            nope_dim=rnd.choice([2, 3]), rope_dim=rope, value_dim=rnd.choice([3, 4]), norm_eps=3e-2,
        )  # fmt: skip
        fields |= {
            "latent": latent, "n_kv_heads": heads, "head_dim": latent.nope_dim + latent.rope_dim
        }  # fmt: skip
    else:
        fields |= {"qkv_bias": rnd.random() < 0.3, "qk_norm": rnd.random() < 0.3}
    if rnd.random() < 0.4:
        fields["rope_scaling"] = rnd.choice([
            RopeScaling("linear", 4.0),
            RopeScaling("llama3", 8.0, 1.0, 4.0, original_positions=32),
            RopeScaling("yarn", 8.0, 0.5, 4.0, 32, amplitude=1.2, score_factor=0.8),
        ])
    fields["window"] = draw_windows(rnd, layers)
    windows = fields["window"] if isinstance(fields["window"], tuple) else (fields["window"],)
    if any(windows):
        fields["sinks"] = rnd.choice([0, 0, 1, 2, 4])
    return fields


def draw_windows(rnd: random.Random, layers: int) -> int | tuple[int | None, ...] | None:
    one = rnd.choice([1, 2, 3, 4, 8])
    choice = rnd.randrange(4)
    if choice == 0:
        return None
    if choice == 1:
        return one
    other = rnd.choice([1, 3, 5]) if choice == 3 else None
    return tuple(rnd.choice([one, other]) for _ in range(layers))


def draw_library(rnd: random.Random, family: str) -> Fields:
    """Changes to ``reference.SIZES``."""
    heads = SIZES["num_attention_heads"]
    layers = rnd.choice([1, 2, 3])
    fields: Fields = {
        "num_hidden_layers": layers,
        "num_key_value_heads": rnd.choice([1, 2, heads]),
        "tie_word_embeddings": rnd.random() < 0.3,
    }
    theta = rnd.choice([50.0, 100.0, 10_000.0])
    ropes = [
        {"rope_type": "default", "rope_theta": theta},
        {"rope_type": "linear", "rope_theta": theta, "factor": 4.0},
        LLAMA3_ROPE,
        YARN_ROPE,
    ]
    if family == "llama":
        fields["rope_parameters"] = rnd.choice(ropes)
    if family == "mistral":
        fields["sliding_window"] = rnd.choice([None, 1, 3, 5])
    if family in ("llama", "mistral", "qwen3"):
        fields["head_dim"] = rnd.choice([8, 12]) if family != "llama" else 8
    if family in ("qwen2", "qwen3") and rnd.random() < 0.7:
        kinds = ("sliding_attention", "full_attention")
        fields |= {
            "layer_types": [rnd.choice(kinds) for _ in range(layers)],
            "use_sliding_window": True,
            "sliding_window": rnd.choice([1, 3, 5]),
            "max_window_layers": 0,
        }
    if family.startswith("deepseek"):
        fields |= {
            "num_key_value_heads": heads,
            "q_lora_rank": rnd.choice([None, 20]),
            "kv_lora_rank": rnd.choice([12, 14]),
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 8,
            "v_head_dim": rnd.choice([5, 10]),
            "first_k_dense_replace": layers,
            "rope_parameters": rnd.choice([*ropes[:2], YARN_ROPE]),
        }
    if family == "deepseek-v3":
        fields["rope_interleave"] = rnd.random() < 0.5
    return fields
