"""The transformer: tokens to logits, with a cache or without, by the same code.

Knows: layers, weights, positions as the cache hands them out. Does not know: what kind of cache
it feeds, where weights come from, how tokens are chosen.

Inside, activations are two-dimensional, (B·T, C): one row per token. Only attention needs to
know which rows belong to one sequence.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbook.cache import (
    BlockPool,
    CacheGroup,
    Contiguous,
    DenseStore,
    KVCache,
    Layout,
    Paged,
    Placement,
    Recompute,
    Ring,
    SlotMajorStore,
    Store,
    TailedGroup,
    new_store,
)
from kvbook.cache.step import check_counts
from kvbook.config import ModelConfig
from kvbook.errors import CacheFullError
from kvbook.model.attention import Attend, attend
from kvbook.model.latent import LatentAttention
from kvbook.model.rope import Rope, rotate

Cache = KVCache | Recompute


class Attention(nn.Module):
    """Project, rotate, let the cache add the new keys, attend, project back, add."""

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
                cache: Cache) -> Tensor:
        H, Hkv, D = self.config.n_heads, self.config.n_kv_heads, self.config.head_dim
        B = len(cache.lengths)
        qk, v = self.qkv(x).view(B, -1, H + 2 * Hkv, D).split([H + Hkv, Hkv], 2)
        if self.config.qk_norm:
            q, k = qk.split([H, Hkv], 2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        qk = rotate(qk, *angles).transpose(1, 2)
        q, k = qk.split([H, Hkv], 1)  # (B, heads, T, D)
        view = cache.update(self.layer, k, v.transpose(1, 2))
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

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        x = self.attention(x, self.attention_norm(x), angles, cache)
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
    def layout(self) -> Layout:
        """What a cache of this model stores per token."""
        c = self.config
        return Layout(
            c.n_layers, c.cached_heads, c.cached_key_dim, c.cached_value_dim, self.dtype
        )

    def new_cache(
        self,
        batch: int,
        capacity: int,
        store: Callable[..., Store] = DenseStore,
        tail: int = 0,
        rollback: int | None = None,
    ) -> KVCache:
        """An empty cache for ``batch`` sequences of up to ``capacity`` tokens.

        Layers with the same window make one group. ``store`` makes the store of a group, with
        DenseStore's arguments; the last ``tail`` tokens stay as they are. With ``rollback``,
        layers with a window keep no more than they see and so many tokens that may be taken
        back (a ring); without it, every layer keeps the whole text.
        """
        placements: list[Placement] = []
        for window, sinks in self._kinds:
            if window is not None and rollback is not None:
                placements.append(Ring(batch, window, rollback, sinks))
            else:
                placements.append(Contiguous(batch, capacity))
        return self._cache(placements, store, tail)

    def new_paged_cache(
        self,
        batch: int,
        *pools: BlockPool,
        store: Callable[..., Store] = SlotMajorStore,
        tail: int = 0,
    ) -> KVCache:
        """An empty cache for ``batch`` sequences whose tokens lie in the blocks of a pool.

        Layers with the same window make one group, and each group has a pool of its own, in the
        order in which the layers first name their windows. Windowed layers keep the whole text.
        ``store`` and ``tail`` are those of ``new_cache``. Raises ``ValueError`` if the pools are
        not as many as the groups.
        """
        if len(pools) != len(self._kinds):
            raise ValueError(
                f"the model's layers have {len(self._kinds)} different windows and need a pool "
                f"for each, got {len(pools)}; give BlockPool(blocks, block_size) so many times"
            )
        return self._cache([Paged(batch, pool) for pool in pools], store, tail)

    @property
    def _kinds(self) -> list[tuple[int | None, int]]:
        """Window and sinks of each group of layers, in the order in which layers name them."""
        sinks = self.config.sinks
        windows = dict.fromkeys(self.config.windows)
        return [(window, 0 if window is None else sinks) for window in windows]

    def _cache(
        self, placements: Sequence[Placement], make: Callable[..., Store], tail: int
    ) -> KVCache:
        """A cache with one group for each kind of layer, placed as ``placements`` says."""
        windows = self.config.windows
        groups = []
        for (window, sinks), placement in zip(self._kinds, placements, strict=True):
            layout = self.layout._replace(layers=windows.count(window))
            store = new_store(make, layout, *placement.store_shape, self.device)
            if tail == 0 and store.tile == 1:
                groups.append(CacheGroup(placement, store, window, sinks))
            else:
                groups.append(TailedGroup(placement, store, tail, window, sinks))
        kinds = [window for window, _ in self._kinds]
        return KVCache(*groups, pattern=[kinds.index(window) for window in windows])

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        counts: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits (B, T, V) for int64 ``tokens`` (B, T); (B, 1, V) with ``last_only``.

        With a cache, the tokens continue what it holds, and it holds them afterwards. Without
        one they are the whole text. ``counts[b]`` is the number of real tokens in row b, which
        stand at its right end; what is left of them is padding and its logits mean nothing.

        Raises ``ValueError`` for a wrong shape, dtype, token or count and ``CacheFullError``
        (a ``ValueError``) when the cache or the position table is too short; the cache is
        unchanged then.
        """
        check_tokens(tokens, self.config.vocab_size)
        B, T = tokens.shape
        counts = check_counts(counts, B, T)
        if cache is not None:
            self._check_cache(cache)
        memory: Cache = cache if cache is not None else Recompute(
            B, tokens.device, self.config.windows, self.config.sinks
        )
        self._check_positions(memory.lengths, counts)
        angles = self.rope.at(memory.reserve(counts, T), self.dtype)
        x = self.embedding(tokens).view(B * T, -1)
        for block in self.blocks:
            x = block(x, angles, memory)
        if last_only:
            x = x.view(B, T, -1)[:, -1]
        return F.linear(self.norm(x), self.head_weight).view(B, -1, self.config.vocab_size)

    def _check_cache(self, cache: KVCache) -> None:
        """Raise ``ValueError`` unless each layer is cached as this model's layers are."""
        windows = self.config.windows
        given = cache.layer_kinds
        needed = [
            (*self.layout[1:], window, 0 if window is None else self.config.sinks)
            for window in windows
        ]
        if len(given) != len(needed):
            differ = [f"layers {len(given)} instead of {len(needed)}"]
        else:
            names = (*Layout._fields[1:], "window", "sinks")
            differ = list(dict.fromkeys(
                f"{name} {has} instead of {need}"
                for has_all, need_all in zip(given, needed, strict=True)
                for name, has, need in zip(names, has_all, need_all, strict=True)
                if has != need
            ))
        if differ:
            raise ValueError(
                f"the cache belongs to another model: {', '.join(differ)}; use model.new_cache()"
            )

    def _check_positions(self, lengths: Sequence[int], counts: Sequence[int]) -> None:
        for row, (length, count) in enumerate(zip(lengths, counts, strict=False)):
            if length + count > self.config.max_positions:
                raise CacheFullError(
                    f"row {row} would reach {length + count} tokens, but the model has "
                    f"{self.config.max_positions} positions; shorten the input"
                )


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ``ValueError`` unless ``tokens`` is int64, (B, T), not empty and in the vocabulary."""
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
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token ids must be from 0 to {vocab_size - 1}, got {low if low < 0 else high}; "
            "check that the tokenizer belongs to this model"
        )
