"""Multi-head latent attention (MLA): one small vector per token serves every head.

Knows: the projections to the latent and back, two ways to attend over latents. Does not know:
what kind of cache keeps the latents, masks.

A token is cached as one key without a value: its latent after the norm, then its rotated part.
Each head's own keys and values are linear maps of the latent. *Materialized* computes them for
every token that is read. *Absorbed* never does: (q)ᵀ(W c) = (Wᵀ q)ᵀ(c), so the map of the keys
moves to the query, and since the map of the values is the same for every token, it is applied
once, after the weighted sum. The result is attention of H heads over one latent head.

(DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.)
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbook.cache import KVView, Memory, View
from kvbook.config import LatentConfig, ModelConfig
from kvbook.model.attention import Attend, attend
from kvbook.model.rope import rotate


class LatentAttention(nn.Module):
    """Project down, norm, rotate, let the memory add the new latents, attend, project back, add.

    ``evaluate`` is ``absorbed`` for any number of tokens: one form whose memory is that of the
    latents, however long the text. Engines go over to the materialized form for long prompts,
    where expanding each latent once costs less than H wide heads do.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.latent, self.n_heads = layer, latent, config.n_heads
        C, H, R = config.d_model, config.n_heads, latent.kv_rank
        if latent.q_rank is not None:
            self.query_down = nn.Linear(C, latent.q_rank, bias=False)
            self.query_norm = nn.RMSNorm(latent.q_rank, eps=latent.norm_eps)
        # A head's rows: first the part that meets the latent, then the part that is rotated.
        self.query = nn.Linear(latent.q_rank or C, H * config.head_dim, bias=False)
        # Rows: the latent, then the one rotated key that all heads share.
        self.latent_down = nn.Linear(C, R + latent.rope_dim, bias=False)
        self.latent_norm = nn.RMSNorm(R, eps=latent.norm_eps)
        # A head's rows: its key without positions, then its value.
        self.latent_up = nn.Linear(R, H * (latent.nope_dim + latent.value_dim), bias=False)
        self.output = nn.Linear(H * latent.value_dim, C, bias=False)
        self.attend: Attend = attend
        self.evaluate: Evaluate = absorbed
        self.scale = config.scale

    def forward(self, residual: Tensor, x: Tensor, angles: tuple[Tensor, Tensor],
                memory: Memory) -> Tensor:
        H, sizes = self.n_heads, self.latent
        B = len(memory.lengths)
        q = self._queries(x).view(B, -1, H, sizes.nope_dim + sizes.rope_dim)
        q_nope, q_rope = q.split([sizes.nope_dim, sizes.rope_dim], -1)
        down = self.latent_down(x).view(B, -1, 1, sizes.kv_rank + sizes.rope_dim)
        latent, k_rope = down.split([sizes.kv_rank, sizes.rope_dim], -1)
        q_rope, k_rope = rotate(torch.cat([q_rope, k_rope], 2), *angles).split([H, 1], 2)
        entry = torch.cat([self.latent_norm(latent), k_rope], -1).transpose(1, 2)
        view = memory.update(self.layer, entry, entry[..., :0])  # (B, 1, S, R + rope), no values
        out = self.evaluate(self, q_nope.transpose(1, 2), q_rope.transpose(1, 2), view)
        out = out.transpose(1, 2).reshape(len(x), H * sizes.value_dim)
        return torch.addmm(residual, out, self.output.weight.t())

    def _queries(self, x: Tensor) -> Tensor:
        if self.latent.q_rank is not None:
            x = self.query_norm(self.query_down(x))
        return self.query(x)

    def up(self) -> tuple[Tensor, Tensor]:
        """The maps from a latent to each head's key (H, nope, R) and value (H, value, R)."""
        sizes = self.latent
        per_head = self.latent_up.weight.unflatten(0, (self.n_heads, -1))
        key_up, value_up = per_head.split([sizes.nope_dim, sizes.value_dim], 1)
        return key_up, value_up


# (layer, queries without positions (B, H, T, nope), rotated queries (B, H, T, rope), view of
# latents) -> (B, H, T, value)
Evaluate = Callable[[LatentAttention, Tensor, Tensor, View], Tensor]


def materialized(layer: LatentAttention, q_nope: Tensor, q_rope: Tensor, view: View) -> Tensor:
    """Expand every latent that is read to the keys and values of all heads, then attend.

    The expansion lives for this call only: S · H · (nope + rope + value) elements.
    """
    H, sizes = layer.n_heads, layer.latent
    keys, _ = view.read()
    latents, k_rope = keys.split([sizes.kv_rank, sizes.rope_dim], -1)
    expanded = F.linear(latents[:, 0], layer.latent_up.weight)  # (B, S, H · (nope + value))
    expanded = expanded.unflatten(-1, (H, -1)).transpose(1, 2)
    k_nope, values = expanded.split([sizes.nope_dim, sizes.value_dim], -1)
    keys = torch.cat([k_nope, k_rope.expand(-1, H, -1, -1)], -1)
    queries = torch.cat([q_nope, q_rope], -1)
    expanded_view = KVView(keys, values, view.positions, view.mask, view.is_causal)
    return layer.attend(queries, expanded_view, layer.scale)


def absorbed(layer: LatentAttention, q_nope: Tensor, q_rope: Tensor, view: View) -> Tensor:
    """Attend over the latents themselves: they are the keys, and their first R elements the values.

    The whole key is passed as the value and the surplus is dropped from the result: PyTorch's
    fused kernels want keys and values of one width, and are many times faster than the rest.
    """
    key_up, value_up = layer.up()
    queries = torch.cat([torch.einsum("bhtn,hnr->bhtr", q_nope, key_up), q_rope], -1)
    latents, _ = view.read()
    own_values = KVView(latents, latents, view.positions, view.mask, view.is_causal)
    out = layer.attend(queries, own_values, layer.scale)
    sums = out[..., : layer.latent.kv_rank]  # weighted sums of latents
    return torch.einsum("bhtr,hvr->bhtv", sums, value_up)
