"""What the logits must be: the model and its cache from their formulas, one text at a time.

Nothing is shared with kvbook: the weights are read, and every rule is written out once more. A
text keeps, for each layer, the keys and values of all its tokens in the order of positions. What a
store rounds is rounded here in place, when the store would; what a ring forgets is listed.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RoundTrip = Callable[[Tensor], Tensor]  # (tokens of a tile, heads, width), and what is left of it


@dataclass(frozen=True)
class Promise:
    """What a kind of cache keeps: written by hand for each kind in ``kinds``.

    With ``rollback``, a layer of window W keeps ``sinks`` tokens and the last W - 1 + rollback of
    those that have settled. The last ``tail`` tokens, and an unfinished tile, have not settled.
    """

    keys: RoundTrip
    values: RoundTrip
    tail: int = 0
    tile: int = 1
    rollback: int | None = None
    exact: bool = True  # whether nothing is rounded, so that recomputing gives the same


class Weights:
    """The numbers of one model, and the constants of its config."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.of = {name: weight.double() for name, weight in model.named_parameters()}
        self.theta = frequencies(self.config)

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        eps = self.config.norm_eps if eps is None else eps
        return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * self.of[name]

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Pair i of (n, heads, d) is x[i] + j·x[i + d/2]; position p turns it by p·theta[i]."""
        half = x.shape[-1] // 2
        pair = torch.complex(x[..., :half], x[..., half:])
        angle = positions.double()[:, None, None] * self.theta
        scaling = self.config.rope_scaling
        size = 1.0 if scaling is None else scaling.amplitude
        pair = pair * torch.polar(torch.full_like(angle, size), angle)
        return torch.cat([pair.real, pair.imag], -1)


def frequencies(c: Any) -> Tensor:
    """Radians per position of each pair."""
    width = c.rope_dim
    return torch.tensor(
        [slowed(pair, width, c.rope_theta, c.rope_scaling) for pair in range(width // 2)],
        dtype=torch.float64,
    )


def slowed(pair: int, width: int, theta: float, scaling: Any) -> float:
    """theta^(-2 pair / width), and what a scaling makes of it."""
    plain = theta ** (-2 * pair / width)
    if scaling is None:
        return plain
    slow = plain / scaling.factor
    if scaling.kind == "linear":
        return slow
    original, low, high = scaling.original_positions, scaling.low, scaling.high
    if scaling.kind == "llama3":  # by wavelength, as the Llama 3.1 release has it
        wavelength = 2 * math.pi / plain
        if wavelength < original / high:
            return plain
        if wavelength > original / low:
            return slow
        blend = (original / wavelength - low) / (high - low)
        return (1 - blend) * slow + blend * plain

    def pair_that_turns(times: float) -> float:  # YaRN: an even blend between two pairs
        return width * math.log(original / times / (2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(high)), 0)
    last = min(math.ceil(pair_that_turns(low)), width - 1)
    blend = min(max((pair - first) / max(last - first, 0.001), 0.0), 1.0)
    return (1 - blend) * plain + blend * slow


class Text:
    """One row: its tokens, and per layer the keys and values (n, heads, width) of all of them."""

    def __init__(self, weights: Weights, promise: Promise) -> None:
        c = weights.config
        self.promise, self.layers = promise, range(c.n_layers)
        self.windows, self.sinks = c.windows, c.sinks
        if c.latent is None:
            heads, widths = c.n_kv_heads, (c.head_dim, c.head_dim)
        else:
            heads, widths = 1, (c.latent.kv_rank + c.latent.rope_dim, 0)
        empty = [torch.zeros(0, heads, width, dtype=torch.float64) for width in widths]
        self.tokens: list[int] = []
        self.settled = 0
        self.held: list[list[Tensor]] = [list(empty) for _ in self.layers]
        self.alive: list[set[int]] = [set() for _ in self.layers]

    def fork(self) -> "Text":
        other = copy.copy(self)
        other.tokens = list(self.tokens)
        other.held = [[side.clone() for side in layer] for layer in self.held]
        other.alive = [set(layer) for layer in self.alive]
        return other

    def step(self, weights: Weights, new: Sequence[int]) -> Tensor:
        """The logits (T, V) of T new tokens, which are part of the text from now on."""
        if not new:
            return torch.zeros(0, weights.config.vocab_size, dtype=torch.float64)
        start, before = len(self.tokens), self.settled
        self.tokens += new
        promise = self.promise
        while len(self.tokens) - self.settled - promise.tail >= promise.tile:
            self.settled += promise.tile
        x = weights.of["embedding.weight"][list(new)]
        for layer in self.layers:
            part = f"blocks.{layer}."
            inner = weights.norm(x, part + "attention_norm.weight")
            attend = self._grouped if weights.config.latent is None else self._latent
            x = x + attend(weights, layer, inner, start, before)
            inner = weights.norm(x, part + "mlp_norm.weight")
            gate, up = (inner @ weights.of[part + "mlp.gate_up.weight"].T).chunk(2, -1)
            x = x + (gate / (1 + (-gate).exp()) * up) @ weights.of[part + "mlp.down.weight"].T
        head = "embedding" if weights.config.tied_embeddings else "head"
        return weights.norm(x, "norm.weight") @ weights.of[head + ".weight"].T

    def _grouped(self, w: Weights, layer: int, x: Tensor, start: int, before: int) -> Tensor:
        """Heads that share keys and values."""
        c, part, T = w.config, f"blocks.{layer}.attention.", len(x)
        H, Hkv, D = c.n_heads, c.n_kv_heads, c.head_dim
        projected = x @ w.of[part + "qkv.weight"].T
        if c.qkv_bias:
            projected = projected + w.of[part + "qkv.bias"]
        q, k, v = projected.view(T, H + 2 * Hkv, D).split([H, Hkv, Hkv], 1)
        if c.qk_norm:
            q, k = w.norm(q, part + "q_norm.weight"), w.norm(k, part + "k_norm.weight")
        positions = torch.arange(start, start + T)
        self._keep(layer, w.turned(k, positions), v, before)
        keys, values = (side.repeat_interleave(H // Hkv, 1) for side in self.held[layer])
        scores = torch.einsum("thd,shd->hts", w.turned(q, positions), keys) * scale(c)
        out = torch.einsum("hts,shd->thd", self._softmax(layer, scores, start), values)
        return out.reshape(T, H * D) @ w.of[part + "output.weight"].T

    def _latent(self, w: Weights, layer: int, x: Tensor, start: int, before: int) -> Tensor:
        """One vector for all heads; each makes its keys and values of it."""
        c, part, T, H = w.config, f"blocks.{layer}.attention.", len(x), w.config.n_heads
        sizes = c.latent
        nope, rope, rank = sizes.nope_dim, sizes.rope_dim, sizes.kv_rank
        positions = torch.arange(start, start + T)
        down = x @ w.of[part + "latent_down.weight"].T
        latent = w.norm(down[:, :rank], part + "latent_norm.weight", sizes.norm_eps)
        turned = w.turned(down[:, None, rank:], positions)
        entry = torch.cat([latent[:, None], turned], -1)
        self._keep(layer, entry, entry[..., :0], before)
        entries = self.held[layer][0][:, 0]
        if sizes.q_rank is not None:
            x = x @ w.of[part + "query_down.weight"].T
            x = w.norm(x, part + "query_norm.weight", sizes.norm_eps)
        q = (x @ w.of[part + "query.weight"].T).view(T, H, nope + rope)
        up = (entries[:, :rank] @ w.of[part + "latent_up.weight"].T).unflatten(-1, (H, -1))
        keys, values = up[..., :nope], up[..., nope:]
        scores = torch.einsum("thd,shd->hts", q[..., :nope], keys)
        scores = scores + torch.einsum(
            "thd,sd->hts", w.turned(q[..., nope:], positions), entries[:, rank:]
        )
        weights = self._softmax(layer, scores * scale(c), start)
        out = torch.einsum("hts,shd->thd", weights, values)
        return out.reshape(T, -1) @ w.of[part + "output.weight"].T

    def _softmax(self, layer: int, scores: Tensor, start: int) -> Tensor:
        """Over the keys that each query sees; (heads, T, n)."""
        window, n = self.windows[layer], len(self.tokens)
        key, query = torch.arange(n)[None], torch.arange(start, n)[:, None]
        hidden = key > query
        if window is not None:
            hidden = hidden | ((query - key >= window) & (key >= self.sinks))
        return scores.masked_fill(hidden, float("-inf")).softmax(-1)

    def _keep(self, layer: int, keys: Tensor, values: Tensor, before: int) -> None:
        promise, held = self.promise, self.held[layer]
        for side, (new, left) in enumerate(
            ((keys, promise.keys), (values, promise.values))
        ):
            held[side] = torch.cat([held[side], new])
            for tile in range(before, self.settled, promise.tile):
                held[side][tile : tile + promise.tile] = left(
                    held[side][tile : tile + promise.tile]
                )
        alive, window = self.alive[layer], self.windows[layer]
        alive |= set(range(len(self.tokens) - len(keys), len(self.tokens)))
        if promise.rollback is not None and window is not None:
            oldest = self.settled - (window - 1 + promise.rollback)
            alive -= set(range(self.sinks, oldest))

    def entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """What a cache must still have, (heads, n, width) each, in the order of positions."""
        alive = sorted(self.alive[layer])
        keys, values = (side[alive].transpose(0, 1) for side in self.held[layer])
        return keys, values

    def can_go_back_to(self, n: int) -> bool:
        if n < self.settled and n % self.promise.tile:
            return False  # a tile was rounded as a whole
        end = min(n, self.settled)
        for layer, window in enumerate(self.windows):
            if window is not None:
                needed = set(range(max(self.sinks, end - window + 1), end))
                if not needed <= self.alive[layer]:
                    return False
        return True

    def go_back_to(self, n: int) -> None:
        del self.tokens[n:]
        self.settled = min(self.settled, n)
        self.alive = [{p for p in layer if p < n} for layer in self.alive]
        self.held = [[side[:n] for side in layer] for layer in self.held]


def scale(c: Any) -> float:
    factor = 1.0 if c.rope_scaling is None else c.rope_scaling.score_factor
    return c.head_dim**-0.5 * factor
