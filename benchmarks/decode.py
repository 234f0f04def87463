"""How fast kvbook prefills and decodes, beside transformers, a hard-wired cache and the floor.

Run it from the repository: ``python benchmarks/decode.py [--quick] [--reps N]``. It prints a table
and, as its last line, one JSON object. README.md in this folder says what each column means.

Knows: contenders, alternation, medians. Does not know: why one contender is faster than another.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvbook.cache import KVView
from kvbook.model.transformer import Transformer
from kvbook.model.weights import load_smollm2

DTYPES = (torch.float32, torch.bfloat16)
# How far two sets of logits may be apart: root mean square, in the logits' standard deviations.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15}
STEPS = 4  # tokens decoded in one repetition, before the context is restored
LEAST_REPS = 3  # of every case, even when they take longer than SECONDS_PER_CASE
SECONDS_PER_CASE = 20.0

HEADER = (
    "                                    tokens/s               kvbook's speed against\n"
    "phase    dtype     batch  context   kvbook  transformers   transformers  floor  hard-wired"
)
ROW = (
    "{phase:8} {dtype:9} {batch:5}  {context:7} {kvbook_tok_s:8.1f}  {transformers_tok_s:12.1f}"
    "   {ratio:11.2f}x  {floor_share:5.2f}  {hardwired_ratio:10.3f}"
)

Row = dict[str, Any]
Past = list[tuple[Tensor, Tensor]]  # keys and values of each layer, (B, Hkv, S, D) each


@dataclass(frozen=True)
class Case:
    """``prefill``: ``context`` tokens in one call. ``decode``: one token after ``context``."""

    phase: str
    batch: int
    context: int


FULL = [
    *(Case("prefill", batch, 512) for batch in (1, 8)),
    *(Case("decode", batch, context) for batch in (1, 8) for context in (512, 2048)),
]
QUICK = [Case("prefill", 1, 512), Case("decode", 1, 512)]


class Contender(Protocol):
    """One way to run the model. Only ``step`` is timed."""

    def start(self, past: Past, context: int) -> None:
        """Hold a copy of ``past``, with room for ``context`` tokens per row and STEPS more."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens (B, T) and return the last position's logits, (B, V)."""

    def rewind(self, length: int) -> None:
        """Forget every token from position ``length`` on."""


class Kvbook:
    """The package as a reader uses it."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def start(self, past: Past, context: int) -> None:
        B, _, S, _ = past[0][0].shape
        self.cache = self.model.new_cache(B, context + STEPS)
        self.cache.reserve([S] * B, S)
        for layer, (keys, values) in enumerate(past):
            self.cache.update(layer, keys, values)

    def step(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, self.cache, last_only=True)[:, -1]

    def rewind(self, length: int) -> None:
        self.cache.truncate(length)


class Transformers:
    """The reference library as it comes: SDPA attention, DynamicCache, last logits only."""

    def __init__(self, model: Transformer) -> None:
        self.model = as_llama(model)

    def start(self, past: Past, context: int) -> None:
        self.cache = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            self.cache.update(keys, values, layer)

    def step(self, tokens: Tensor) -> Tensor:
        out = self.model(tokens, cache=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def rewind(self, length: int) -> None:
        self.cache.crop(length - self.cache.get_seq_length())  # minus the tokens to remove


class HardWired:
    """kvbook's layers over slices of one tensor: no KVCache, no checks, rows of equal length."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def start(self, past: Past, context: int) -> None:
        B, Hkv, S, D = past[0][0].shape
        shape = (len(past), B, Hkv, context + STEPS, D)
        self.keys = torch.zeros(shape, dtype=self.model.dtype).unbind(0)
        self.values = torch.zeros(shape, dtype=self.model.dtype).unbind(0)
        for layer, (keys, values) in enumerate(past):
            self.keys[layer][:, :, :S], self.values[layer][:, :, :S] = keys, values
        self.line = torch.arange(context + STEPS)
        self.lengths, self.length = (S,) * B, S

    def step(self, tokens: Tensor) -> Tensor:
        B, T = tokens.shape
        start, self.length = self.length, self.length + T
        self.new, self.seen = slice(start, self.length), slice(0, self.length)
        self.causal = T > 1
        angles = self.model.rope.at(self.line[None, self.new], self.model.dtype)
        x = self.model.embedding(tokens).view(B * T, -1)
        for block in self.model.blocks:
            x = block(x, angles, self)
        x = x.view(B, T, -1)[:, -1]
        return F.linear(self.model.norm(x), self.model.head_weight)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> KVView:
        all_keys, all_values = self.keys[layer], self.values[layer]
        all_keys[:, :, self.new], all_values[:, :, self.new] = keys, values
        return KVView(
            all_keys[:, :, self.seen], all_values[:, :, self.seen], self.line, None, self.causal
        )

    def rewind(self, length: int) -> None:
        self.length = length


class Floor:
    """The products of all weights with nothing in between, and the cache's bytes read once.

    No code around the same products can be faster. Attention itself is not computed.
    """

    def __init__(self, model: Transformer) -> None:
        self.dtype, self.head = model.dtype, model.head_weight
        blocks = model.blocks.state_dict().values()
        self.weights = [weight for weight in blocks if weight.ndim == 2]

    def start(self, past: Past, context: int) -> None:
        B, Hkv, S, D = past[0][0].shape
        self.batch, rows = B, B if S else B * context
        self.inputs = {
            width: torch.randn(rows, width).to(self.dtype)
            for width in {w.shape[1] for w in self.weights}
        }
        floats = 2 * B * Hkv * context * D * self.dtype.itemsize // 4  # a layer's, read as float32
        self.cached = [torch.ones(floats) for _ in past]

    def step(self, tokens: Tensor) -> Tensor:
        for weight in self.weights:
            F.linear(self.inputs[weight.shape[1]], weight)
        for cached in self.cached:
            cached.sum()
        return F.linear(self.inputs[self.head.shape[1]][: self.batch], self.head)

    def rewind(self, length: int) -> None:
        """Nothing is held."""


def as_llama(model: Transformer) -> LlamaForCausalLM:
    """The same model in transformers, its weights being slices of kvbook's: no second copy."""
    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.d_mlp,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tied_embeddings,
    )
    config._attn_implementation = "sdpa"
    own = model.state_dict()
    weights = {
        "model.embed_tokens.weight": own["embedding.weight"],
        "model.norm.weight": own["norm.weight"],
        "lm_head.weight": model.head_weight,
    }
    for layer in range(c.n_layers):
        here, there = f"blocks.{layer}.", f"model.layers.{layer}."
        heads = [n * c.head_dim for n in (c.n_heads, c.n_kv_heads, c.n_kv_heads)]
        q, k, v = own[here + "attention.qkv.weight"].split(heads)
        gate, up = own[here + "mlp.gate_up.weight"].chunk(2)
        weights |= {
            there + "input_layernorm.weight": own[here + "attention_norm.weight"],
            there + "self_attn.q_proj.weight": q,
            there + "self_attn.k_proj.weight": k,
            there + "self_attn.v_proj.weight": v,
            there + "self_attn.o_proj.weight": own[here + "attention.output.weight"],
            there + "post_attention_layernorm.weight": own[here + "mlp_norm.weight"],
            there + "mlp.gate_proj.weight": gate,
            there + "mlp.up_proj.weight": up,
            there + "mlp.down_proj.weight": own[here + "mlp.down.weight"],
        }
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(weights, assign=True)
    return llama.eval().requires_grad_(False)


def read_past(model: Transformer, batch: int, length: int) -> Past:
    """The keys and values of ``length`` random tokens, the same for each row."""
    c = model.config
    cache = model.new_cache(1, max(length, 1))
    if length:
        model(torch.randint(0, c.vocab_size, (1, length)), cache, last_only=True)
    entries = [cache.entries(layer) for layer in range(c.n_layers)]
    return [(k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)) for k, v in entries]


def check_logits(contenders: dict[str, Contender], tokens: Tensor, length: int) -> None:
    """Raise ``ValueError`` if a contender's next logits are not kvbook's. Also the warm-up."""
    logits = contenders["kvbook"].step(tokens)
    allowed, expected = TOLERANCE[logits.dtype], logits.float()
    for name in ("transformers", "hardwired"):
        difference = contenders[name].step(tokens).float() - expected
        error = (difference.square().mean().sqrt() / expected.std()).item()
        if not error <= allowed:
            raise ValueError(
                f"{name} and kvbook disagree: logits differ by {error:.2g} standard deviations, "
                f"allowed are {allowed}; do not time models that compute different things"
            )
    contenders["floor"].step(tokens)
    for contender in contenders.values():
        contender.rewind(length)


def seconds(contender: Contender, tokens: Tensor, steps: int, length: int) -> float:
    """Time of ``steps`` greedy steps from ``length`` tokens on, which is restored after."""
    start = time.perf_counter()
    for _ in range(steps):
        tokens = contender.step(tokens).argmax(-1, keepdim=True)
    elapsed = time.perf_counter() - start
    contender.rewind(length)
    return elapsed


@torch.inference_mode()
def measure(model: Transformer, contenders: dict[str, Contender], case: Case, reps: int) -> Row:
    """Median speeds of one case. The contenders take turns in random order."""
    prefill = case.phase == "prefill"
    length, T, steps = (0, case.context, 1) if prefill else (case.context, 1, STEPS)
    past = read_past(model, case.batch, length)
    for contender in contenders.values():
        contender.start(past, case.context)
    tokens = torch.randint(0, model.config.vocab_size, (case.batch, T))
    check_logits(contenders, tokens, length)

    times: dict[str, list[float]] = {name: [] for name in contenders}
    names, order = list(contenders), random.Random(0)
    deadline = time.perf_counter() + SECONDS_PER_CASE
    while len(times["kvbook"]) < reps:
        if len(times["kvbook"]) >= LEAST_REPS and time.perf_counter() > deadline:
            break
        order.shuffle(names)  # so that no one always runs in another's wake
        for name in names:
            times[name].append(seconds(contenders[name], tokens, steps, length))

    def speed(name: str) -> float:
        return case.batch * T * steps / statistics.median(times[name])

    def against(name: str) -> float:
        """kvbook's speed as a multiple of another's, by the median over repetitions."""
        pairs = zip(times[name], times["kvbook"], strict=True)
        return statistics.median(other / own for other, own in pairs)

    return {
        "phase": case.phase,
        "batch": case.batch,
        "context": case.context,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kvbook_tok_s": round(speed("kvbook"), 2),
        "transformers_tok_s": round(speed("transformers"), 2),
        "ratio": round(against("transformers"), 3),
        "floor_share": round(against("floor"), 3),
        "hardwired_ratio": round(against("hardwired"), 3),
    }


def make_contenders(model: Transformer) -> dict[str, Contender]:
    return {
        "kvbook": Kvbook(model),
        "transformers": Transformers(model),
        "hardwired": HardWired(model),
        "floor": Floor(model),
    }


def run(load: Callable[[torch.dtype], Transformer], cases: Sequence[Case], reps: int) -> list[Row]:
    """Measure every case in every dtype and print each row as it comes."""
    print(HEADER)
    rows = []
    for dtype in DTYPES:
        model = load(dtype)
        contenders = make_contenders(model)
        for case in cases:
            row = measure(model, contenders, case, reps)
            print(ROW.format(**row), flush=True)
            rows.append(row)
    return rows


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def report(load: Callable[[torch.dtype], Transformer], cases: Sequence[Case], reps: int) -> None:
    """Print the table, and then everything as one JSON line."""
    torch.manual_seed(0)
    rows = run(load, cases, reps)
    print(json.dumps({"benchmark": "decode", "rows": rows, "machine": machine()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="batch 1 and 512 tokens only, 3 repetitions"
    )
    parser.add_argument("--reps", type=int, help="repetitions of each case, at most")
    options = parser.parse_args()
    reps = options.reps or (LEAST_REPS if options.quick else 15)
    report(load_smollm2, QUICK if options.quick else FULL, reps)


if __name__ == "__main__":
    main()
