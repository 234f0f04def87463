"""One right call of every public function, method and class: what the misuse sweep starts from.

Each entry makes fresh objects, so that a call may change them. ``state`` is what a refused call
must leave as it was.
"""

import tempfile
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from oracles.gguf_files import TOKENIZER, write_llama
from oracles.reference import BY_NAME, save
from oracles.toys import LATENT, toy

import kvbook
from kvbook import measure
from kvbook.cache import Codec, KVCache, KVView
from kvbook.model.experiment import attend_with
from kvbook.model.transformer import Transformer
from sweeps.wrong_values import Good

KIND = kvbook.LayerKind(2, 6, 6, torch.float64)
MODEL = toy()
DEEP = toy(**LATENT)
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@lru_cache
def folder() -> Path:
    """A model folder with a tokenizer, and a GGUF file in it: made once, only read."""
    root = Path(tempfile.mkdtemp(prefix="kvbook-sweep-"))
    write_llama(root / "m.gguf", toy(head_dim=4), extra=TOKENIZER)
    save(BY_NAME["llama-gqa"].build(), root)
    tokenizer()._backend.save(str(root / "tokenizer.json"))
    return root


@lru_cache
def tokenizer() -> kvbook.Tokenizer:
    root = Path(tempfile.mkdtemp(prefix="kvbook-sweep-"))
    write_llama(root / "m.gguf", toy(head_dim=4), extra=TOKENIZER)
    return kvbook.load_tokenizer(root / "m.gguf")


def ticking() -> measure.HostClock:
    ticks = count()
    return measure.HostClock(now=lambda: float(next(ticks)))


def filled(cache: KVCache | None = None, rows: int = 1) -> KVCache:
    cache = MODEL.new_cache(rows, 12) if cache is None else cache
    MODEL(TOKENS.expand(rows, -1), cache)
    return cache


def life(cache: KVCache) -> Callable[[], Any]:
    """Lengths and bytes of a cache: what an error must not change."""
    return lambda: (
        cache.lengths, [tensor.contiguous().view(torch.uint8).tolist() for tensor in cache.tensors]
    )


def held(cache: KVCache) -> Callable[[], Any]:
    """What a cache holds: a slot without a token may have been written in between."""
    return lambda: [
        (n, *(entry.tolist() for layer in range(2) for entry in cache.entries(layer, row)))
        for row, n in enumerate(cache.lengths)
    ]


def pool_life(pool: kvbook.BlockPool) -> Callable[[], Any]:
    return lambda: (
        pool.available, [pool.owners(b) for b in range(pool.blocks)],
        [pool.kept(b) for b in range(pool.blocks)],
    )  # fmt: skip


# ---- Functions of the model room

GOOD: dict[str, Callable[[], Good]] = {}


def good(name: str) -> Callable[[Callable[[], Good]], Callable[[], Good]]:
    def keep(make: Callable[[], Good]) -> Callable[[], Good]:
        GOOD[name] = make
        return make

    return keep


def simple(name: str, function: Callable[..., Any], /, **arguments: Any) -> None:
    """A call without state whose arguments may be shared."""
    GOOD[name] = lambda: Good(function, dict(arguments))


simple("toy_model", kvbook.toy_model, seed=0, dtype=torch.float64)
simple("toy_model fields", kvbook.toy_model, n_layers=2, window=4, sinks=1, norm_eps=1e-5)
simple("sample_text", kvbook.sample_text)
simple("verdict", kvbook.verdict, error=0.0, rounding=1e-10, clear=1e-3)
simple("with_window", kvbook.with_window, model=MODEL, window=4, sinks=1)
simple("attend_by_tiles", kvbook.attend_by_tiles, size=2)
simple("visible", kvbook.visible, queries=TOKENS, keys=TOKENS, window=4, sinks=1)
simple("visible_count", kvbook.visible_count, end=5, window=4, sinks=1)
simple("hidden_states", kvbook.hidden_states, model=MODEL, tokens=TOKENS, cache=None)
simple("cached_entries", kvbook.cached_entries, model=MODEL, tokens=TOKENS[0])
simple("dependencies", kvbook.dependencies, function=lambda x: x, rows=torch.ones(3, 2))


@good("attend_with")
def _() -> Good:
    return Good(attend_with, {"model": toy(seed=1), "attend": kvbook.attend})


@good("evaluate_with")
def _() -> Good:
    return Good(
        kvbook.evaluate_with, {"model": toy(seed=1, **LATENT), "evaluate": kvbook.absorbed}
    )


@good("move_positions")
def _() -> Good:
    model = kvbook.toy_model(n_layers=1)
    return Good(kvbook.move_positions, {"model": model, "move": lambda positions: positions})


def view() -> KVView:
    keys, values = (torch.ones(1, 2, 5, 6).double() for _ in range(2))
    return KVView(keys, values, torch.arange(5)[None], None, True)


@good("attend")
def _() -> Good:
    queries = torch.ones(1, 4, 5, 6).double()
    return Good(kvbook.attend, {"queries": queries, "view": view(), "scale": 0.5})


@good("visibility")
def _() -> Good:
    return Good(
        kvbook.visibility, {"view": view(), "heads": 4, "T": 5, "attend": kvbook.attend}
    )


@good("KVView.tiles")
def _() -> Good:
    return Good(view().tiles, {"size": 2})


@good("logits_in_pieces")
def _() -> Good:
    cache = MODEL.new_cache(1, 12)
    return Good(
        kvbook.logits_in_pieces,
        {"model": MODEL, "tokens": TOKENS[0], "cuts": [2, 3], "cache": cache}, life(cache),
    )  # fmt: skip


@good("token_losses")
def _() -> Good:
    cache = filled()
    arguments = {"model": MODEL, "tokens": TOKENS[0], "cache": cache, "chunk": 2}
    return Good(kvbook.token_losses, arguments, lambda: cache.lengths)


@good("Transformer")
def _() -> Good:
    return Good(
        Transformer, {"config": MODEL.config, "dtype": torch.float32, "device": "cpu"}
    )


@good("Transformer.forward")
def _() -> Good:
    cache = filled()
    arguments = {"tokens": TOKENS, "cache": cache, "counts": [5], "last_only": False}
    return Good(MODEL, arguments, life(cache))


@good("Transformer.new_cache")
def _() -> Good:
    arguments = {
        "batch": 2, "capacity": 12, "store": kvbook.DenseStore, "tail": 0, "rollback": None
    }
    return Good(MODEL.new_cache, arguments)


@good("Transformer.new_paged_cache")
def _() -> Good:
    pool = kvbook.BlockPool(8, 4)
    arguments = {"batch": 2, "pool": pool, "store": kvbook.DenseStore, "tail": 0}
    return Good(
        MODEL.new_paged_cache, arguments, pool_life(pool), positional=("batch", "pool")
    )


@good("Transformer.new_bound_cache")
def _() -> Good:
    pool = kvbook.BlockPool(8, 4)
    return Good(
        MODEL.new_bound_cache, {"pool": pool, "store": kvbook.DenseStore}, pool_life(pool),
        positional=("pool",),
    )  # fmt: skip


@good("new_cache")
def _() -> Good:
    arguments = {
        "layer_kinds": [KIND, KIND], "batch": 2, "capacity": 12, "store": kvbook.DenseStore,
        "tail": 0, "rollback": None, "device": "cpu",
    }  # fmt: skip
    return Good(kvbook.new_cache, arguments)


@good("new_paged_cache")
def _() -> Good:
    pool = kvbook.BlockPool(8, 4)
    arguments = {
        "layer_kinds": [KIND, KIND], "batch": 2, "pool": pool, "store": kvbook.DenseStore,
        "tail": 0, "device": "cpu",
    }  # fmt: skip
    return Good(
        kvbook.new_paged_cache, arguments, pool_life(pool),
        positional=("layer_kinds", "batch", "pool"),
    )  # fmt: skip


@good("new_bound_cache")
def _() -> Good:
    pool = kvbook.BlockPool(8, 4)
    arguments = {
        "layer_kinds": [KIND, KIND], "pool": pool, "store": kvbook.DenseStore, "device": "cpu"
    }
    return Good(
        kvbook.new_bound_cache, arguments, pool_life(pool), positional=("layer_kinds", "pool")
    )


# ---- Files

simple("load_smollm2", kvbook.load_smollm2, dtype=torch.float32, device="cpu")
simple("load_smollm2_tokenizer", kvbook.load_smollm2_tokenizer)
simple("smollm2_chat", kvbook.smollm2_chat, messages=[{"role": "user", "content": "Hi"}])


@good("load_folder")
def _() -> Good:
    return Good(kvbook.load_folder, {"path": folder(), "dtype": None, "device": "cpu"})


@good("load_tokenizer")
def _() -> Good:
    return Good(kvbook.load_tokenizer, {"source": folder()})


@good("Tokenizer")
def _() -> Good:
    return Good(
        kvbook.Tokenizer, {"backend": tokenizer()._backend, "stop_tokens": [0]}
    )


@good("Tokenizer.encode")
def _() -> Good:
    return Good(tokenizer().encode, {"text": "abc"})


@good("Tokenizer.decode")
def _() -> Good:
    return Good(tokenizer().decode, {"tokens": [1, 2]})


# ---- The cache

simple("Codec", Codec, element="int8", group=(1, 32), symmetric=True)
simple("Codec.grouped", kvbook.INT8.grouped, channels=4)
simple("Codec.per_channel", kvbook.INT8.per_channel, tokens=4)
simple("Codec.encode", kvbook.INT8.encode, x=torch.ones(2, 3, 32))
simple("Codec.round_trip", kvbook.INT8.round_trip, x=torch.ones(2, 3, 32))
simple("quantized", kvbook.quantized, keys=kvbook.INT8, values=kvbook.INT8)
simple("LayerKind", kvbook.LayerKind, kv_heads=2, key_dim=6, value_dim=6, dtype=torch.float32,
       window=4, sinks=1)  # fmt: skip
simple("Contiguous", kvbook.Contiguous, rows=2, capacity=8)
simple("Ring", kvbook.Ring, rows=2, window=4, rollback=1, sinks=0)
simple("BlockPool", kvbook.BlockPool, blocks=8, block_size=4)
for kind in (kvbook.DenseStore, kvbook.SlotMajorStore):
    simple(kind.__name__, kind, kind=KIND, layers=2, rows=2, slots=8, device="cpu")


@good("Codec.decode")
def _() -> Good:
    encoded = kvbook.INT8.encode(torch.ones(2, 3, 32))
    return Good(kvbook.INT8.decode, {"encoded": encoded, "dtype": torch.float32})


@good("Paged")
def _() -> Good:
    return Good(kvbook.Paged, {"rows": 2, "pool": kvbook.BlockPool(8, 4)})


@good("BoundPaged")
def _() -> Good:
    return Good(kvbook.BoundPaged, {"pool": kvbook.BlockPool(8, 4)})


@good("CacheGroup")
def _() -> Good:
    store = kvbook.DenseStore(KIND, 2, 2, 8)
    return Good(kvbook.CacheGroup, {"placement": kvbook.Contiguous(2, 8), "store": store})


@good("TailedGroup")
def _() -> Good:
    store = kvbook.DenseStore(KIND, 2, 2, 8)
    arguments = {"placement": kvbook.Contiguous(2, 8), "store": store, "tail": 2}
    return Good(kvbook.TailedGroup, arguments)


@good("KVCache")
def _() -> Good:
    group = kvbook.CacheGroup(kvbook.Contiguous(2, 8), kvbook.DenseStore(KIND, 2, 2, 8))
    return Good(KVCache, {"group": group, "pattern": [0, 0]}, positional=("group",))


def of_cache(method: str, kind: str = "contiguous", **arguments: Any) -> None:
    def make() -> Good:
        cache = filled(CACHES[kind](), rows=2)
        return Good(getattr(cache, method), dict(arguments), life(cache))

    GOOD[f"KVCache.{method} ({kind})"] = make


CACHES: dict[str, Callable[[], KVCache]] = {
    "contiguous": lambda: MODEL.new_cache(2, 12),
    "paged": lambda: MODEL.new_paged_cache(2, kvbook.BlockPool(16, 4)),
    "quantized, with a tail": lambda: MODEL.new_cache(
        2, 12, store=kvbook.quantized(kvbook.INT8.grouped(6)), tail=2
    ),
}
ENTRY = torch.ones(2, 2, 1, 6).double()
for kind in CACHES:
    of_cache("check_room", kind, counts=[1, 1])
    of_cache("reserve", kind, counts=[1, 1], T=1)
    of_cache("entries", kind, layer=0, row=1)
    of_cache("truncate", kind, lengths=[3, 4])
    of_cache("select", kind, rows=[1, 0])
    of_cache("fill_unused", kind, value=7.0)


@good("KVCache.update")
def _() -> Good:
    cache = filled(rows=2)
    cache.reserve([1, 1], 1)
    return Good(cache.update, {"layer": 0, "keys": ENTRY, "values": ENTRY}, life(cache))


@good("KVCache.bind")
def _() -> Good:
    pool = kvbook.BlockPool(8, 4)
    cache = MODEL.new_bound_cache(pool)
    tables = [kvbook.BlockTable(pool, pool.allocate(2))]
    arguments = {"tables": tables, "lengths": [0]}
    return Good(cache.bind, arguments, life(cache), positional=("tables",))


def of_pool(method: str, **arguments: Any) -> None:
    def make() -> Good:
        pool = kvbook.BlockPool(8, 4)
        pool.allocate(4)
        pool.share([1])
        pool.keep([3], lambda block: None)
        return Good(getattr(pool, method), dict(arguments), pool_life(pool))

    GOOD[f"BlockPool.{method}"] = make


of_pool("owners", block=0)
of_pool("allocate", n=2)
of_pool("share", blocks=[0])
of_pool("release", blocks=[0])
of_pool("keep", blocks=[0], forget=lambda block: None)
of_pool("drop", blocks=[3])
of_pool("kept", block=0)
of_pool("writable", block=0)
of_pool("copy_on_write", block=1)


@good("BlockTable")
def _() -> Good:
    pool = kvbook.BlockPool(8, 4)
    return Good(kvbook.BlockTable, {"pool": pool, "blocks": pool.allocate(2)})


@good("PrefixCache")
def _() -> Good:
    return Good(
        kvbook.PrefixCache, {"pool": kvbook.BlockPool(8, 4), "fingerprint": "toy"}
    )


def of_prefix(method: str, **arguments: Any) -> None:
    def make() -> Good:
        pool = kvbook.BlockPool(8, 4)
        prefix = kvbook.PrefixCache(pool, "toy")
        sequence = prefix.begin(list(range(6)))
        prefix.commit(sequence, 5)

        def state() -> Any:
            return (
                pool_life(pool)(), sequence.tokens.tolist(), list(sequence.blocks),
                sequence.written, prefix.cached_blocks, str(prefix.stats),
            )  # fmt: skip

        known = {"sequence": sequence} if method != "begin" else {}
        return Good(getattr(prefix, method), {**known, **arguments}, state)

    GOOD[f"PrefixCache.{method}"] = make


of_prefix("begin", tokens=[1, 2, 3], resumed=False)
of_prefix("append", tokens=[1, 2])
of_prefix("commit", length=6)
of_prefix("retract", length=5)
of_prefix("end")


# ---- Generating

simple("left_pad", kvbook.left_pad, rows=[[1, 2], [3]])
simple("greedy", kvbook.greedy, logits=torch.ones(2, 3))
simple("Sampler", kvbook.Sampler, temperature=1.0, top_k=2, top_p=0.5, generator=None)
simple("Sampler.probabilities", kvbook.Sampler(temperature=1.0).probabilities,
       logits=torch.ones(2, 3))  # fmt: skip
simple("seeded", kvbook.generate.sampling.seeded, seeds=[1, 2], device="cpu")


def of_loop(name: str, /, **extra: Callable[[KVCache], Any]) -> None:
    def make() -> Good:
        cache = filled(rows=2)
        arguments: dict[str, Any] = {
            "model": MODEL, "prompts": [[1, 2], [3]], "max_new_tokens": 2,
            "sampler": kvbook.greedy, **{key: of(cache) for key, of in extra.items()},
        }  # fmt: skip
        return Good(getattr(kvbook, name), arguments, held(cache))

    GOOD[name] = make


of_loop("stream_naive")
of_loop("generate_naive", stop_tokens=lambda cache: [28])
of_loop("stream_cached", cache=lambda cache: cache, stop_tokens=lambda cache: [28])
of_loop("generate_cached", cache=lambda cache: cache, stop_tokens=lambda cache: [28])


def of_prefix_loop(name: str, /, **extra: Any) -> None:
    def make() -> Good:
        pool = kvbook.BlockPool(8, 4)
        cache, prefix = MODEL.new_bound_cache(pool), kvbook.PrefixCache(pool, "toy")
        arguments = {
            "model": MODEL, "prompt": [1, 2, 3], "max_new_tokens": 2, "cache": cache,
            "prefix": prefix, "sampler": kvbook.greedy, "resumed": False, **extra,
        }  # fmt: skip
        return Good(getattr(kvbook, name), arguments, pool_life(pool))

    GOOD[name] = make


of_prefix_loop("stream_with_prefix")
of_prefix_loop("generate_with_prefix", stop_tokens=[28])
