"""The transformer: tokens to logits, with a cache or without, by the same code.

Knows: layers, weights, positions as the cache hands them out. Does not know: what kind of cache
it feeds, where weights come from, how tokens are chosen.

Inside, activations are two-dimensional, (B·T, C): one row per token. Only attention needs to
know which rows belong to one sequence.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbook.cache import (
    BlockPool,
    KVCache,
    LayerKind,
    Memory,
    Recompute,
    new_bound_cache,
    new_cache,
    new_paged_cache,
)
from kvbook.cache.sizes import check_class
from kvbook.cache.step import check_counts
from kvbook.cache.store import usable_device
from kvbook.config import ModelConfig
from kvbook.errors import CacheFullError
from kvbook.model.attention import Attend, attend
from kvbook.model.latent import LatentAttention
from kvbook.model.rope import Rope, rotate


class Attention(nn.Module):
    """Project, rotate, let the memory add the new keys, attend, project back, add."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        C, H, Hkv, D = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        # One product for all three: rows are the q heads, then the k heads, then the v heads.
        self.qkv = nn.Linear(C, (H + 2 * Hkv) * D, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(D, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(D, eps=config.norm_eps)
        self.output = nn.Linear(H * D, C, bias=False)
        self.attend: Attend = attend
        self.scale = config.scale

    def forward(self, residual: Tensor, x: Tensor, angles: tuple[Tensor, Tensor],
                memory: Memory) -> Tensor:
        H, Hkv, D = self.config.n_heads, self.config.n_kv_heads, self.config.head_dim
        B = len(memory.lengths)
        qk, v = self.qkv(x).view(B, -1, H + 2 * Hkv, D).split([H + Hkv, Hkv], 2)
        if self.config.qk_norm:
            q, k = qk.split([H, Hkv], 2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        qk = rotate(qk, *angles).transpose(1, 2)
        q, k = qk.split([H, Hkv], 1)  # (B, heads, T, D)
        view = memory.update(self.layer, k, v.transpose(1, 2))
        out = self.attend(q, view, self.scale)  # (B, H, T, D)
        out = out.transpose(1, 2).reshape(len(x), H * D)
        return torch.addmm(residual, out, self.output.weight.t())


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), added to the residual. (Shazeer 2020, arXiv 2002.05202.)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_mlp, bias=False)  # gate, then up
        self.down = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, residual: Tensor, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return torch.addmm(residual, F.silu(gate).mul_(up), self.down.weight.t())


class Block(nn.Module):
    """One layer: attention and MLP, each on a normalized copy of the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = (
            Attention(config, layer)
            if config.latent is None
            else LatentAttention(config, config.latent, layer)
        )
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        x = self.attention(x, self.attention_norm(x), angles, memory)
        return self.mlp(x, self.mlp_norm(x))


class Transformer(nn.Module):
    """A decoder-only transformer of the Llama family, for inference.

    Weights start as seeded random numbers (``torch.manual_seed`` decides); ``kvbook.model.weights``
    loads real ones. The model is in evaluation mode and asks for no gradients.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        check_class("config", config, ModelConfig, "ModelConfig.from_hf() reads one")
        device = usable_device(device)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        if not config.tied_embeddings:
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.rope = Rope(config)
        self.to(device, dtype).eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def head_weight(self) -> Tensor:
        """(V, C): the embedding itself when the two are tied."""
        return self.embedding.weight if self.config.tied_embeddings else self.head.weight

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """What each layer stores per token and how far back it sees."""
        c = self.config
        widths = (c.cached_heads, c.cached_key_dim, c.cached_value_dim, self.dtype)
        return tuple(
            LayerKind(*widths, window, 0 if window is None else c.sinks) for window in c.windows
        )

    def new_cache(self, batch: int, capacity: int, **how: Any) -> KVCache:
        """A cache for this model's layers: ``kvbook.cache.build.new_cache`` says how."""
        return new_cache(self.layer_kinds, batch, capacity, device=self.device, **how)

    def new_paged_cache(self, batch: int, *pools: BlockPool, **how: Any) -> KVCache:
        """Its tokens lie in blocks: see ``kvbook.cache.build.new_paged_cache``."""
        return new_paged_cache(self.layer_kinds, batch, *pools, device=self.device, **how)

    def new_bound_cache(self, *pools: BlockPool, **how: Any) -> KVCache:
        """Its rows are bound to block tables: see ``kvbook.cache.build.new_bound_cache``."""
        return new_bound_cache(self.layer_kinds, *pools, device=self.device, **how)

    def forward(
        self,
        tokens: Tensor,
        cache: Memory | None = None,
        counts: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits (B, T, V) for int64 ``tokens`` (B, T); (B, 1, V) with ``last_only``.

        With a cache, the tokens continue what it holds, and it holds them afterwards. Without
        one they are the whole text. ``counts[b]`` is the number of real tokens in row b, which
        stand at its right end; what is left of them is padding and its logits mean nothing.

        Raises ``ValueError`` for a wrong shape, dtype, token or count and ``CacheFullError``
        (a ``ValueError``) when the cache or the position table is too short; the cache is
        unchanged then. No tensor is read back from the device.
        """
        check_shape(tokens)
        if tokens.device != self.device:
            raise ValueError(
                f"tokens are on {tokens.device}, but the model is on {self.device}; move one"
            )
        B, T = tokens.shape
        counts = check_counts(counts, B, T)
        if type(last_only) is not bool:
            raise ValueError(f"last_only must be True or False, got {last_only!r:.80}")
        memory = Recompute(B, self.layer_kinds, self.device) if cache is None else cache
        self._check_memory(memory)
        end = self._check_positions(memory.lengths, counts)
        x = self._embed(tokens)  # before anything changes: here an unknown token shows
        angles = self.rope.at(memory.reserve(counts, T), self.dtype, end)
        for block in self.blocks:
            x = block(x, angles, memory)
        if last_only:
            x = x.view(B, T, -1)[:, -1]
        return F.linear(self.norm(x), self.head_weight).view(B, -1, self.config.vocab_size)

    def _embed(self, tokens: Tensor) -> Tensor:
        """(B·T, C). On an accelerator nothing is read back: ids are checked where lists come in."""
        try:
            x = self.embedding(tokens)
        except IndexError:
            check_tokens(tokens, self.config.vocab_size)  # says which
            raise
        return x.view(tokens.numel(), -1)

    def _check_memory(self, memory: Memory) -> None:
        """Raise ``ValueError`` unless each layer is remembered as this model's layers are."""
        check_class("cache", memory, Memory, "model.new_cache() makes one")
        given, needed = memory.layer_kinds, self.layer_kinds
        if len(given) != len(needed):
            differ = [f"layers {len(given)} instead of {len(needed)}"]
        else:
            differ = list(dict.fromkeys(
                f"{field.name} {getattr(has, field.name)} instead of {getattr(need, field.name)}"
                for has, need in zip(given, needed, strict=True)
                if has != need
                for field in fields(LayerKind)
                if getattr(has, field.name) != getattr(need, field.name)
            ))
        if differ:
            raise ValueError(
                f"the cache belongs to another model: {', '.join(differ)}; use model.new_cache()"
            )
        kind = self.device.type
        if torch.is_autocast_enabled(kind):
            raise ValueError(
                f"autocast is on for {kind!r}, which changes dtypes inside of layers; leave it, "
                "and build the model in the dtype that you want"
            )

    def _check_positions(self, lengths: Sequence[int], counts: Sequence[int]) -> int:
        """Where the longest row will end. ``CacheFullError`` beyond the model's positions."""
        for row, (length, count) in enumerate(zip(lengths, counts, strict=False)):
            if length + count > self.config.max_positions:
                raise CacheFullError(
                    f"row {row} would reach {length + count} tokens, but the model has "
                    f"{self.config.max_positions} positions; shorten the input"
                )
        ends = (length + count for length, count in zip(lengths, counts, strict=False))
        return max(ends, default=0)  # no rows: the memory says so


def check_shape(tokens: Tensor) -> None:
    """Raise ``ValueError`` unless ``tokens`` is int64, (B, T) and not empty."""
    if not isinstance(tokens, Tensor):
        raise ValueError(
            "tokens must be an int64 tensor of shape (batch, tokens), got "
            f"{type(tokens).__name__}; one prompt is torch.tensor([ids])"
        )
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or tokens.numel() == 0:
        raise ValueError(
            "tokens must be a non-empty int64 tensor of shape (batch, tokens), got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}; one prompt is torch.tensor([ids])"
        )


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ``ValueError`` unless ``tokens`` has the right shape and is in the vocabulary.

    For where lists become tensors: of a tensor on an accelerator two numbers are waited for.
    """
    check_shape(tokens)
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token ids must be from 0 to {vocab_size - 1}, got {low if low < 0 else high}; "
            "check that the tokenizer belongs to this model"
        )
