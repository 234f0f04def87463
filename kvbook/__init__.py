"""kvbook: the package behind the book on KV caching.

The public names below are loaded on first use, so that parts which need no torch start without
it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbook.accounting import (
        POLICIES,
        PRESETS,
        CacheGeometry,
        CacheSize,
        Hardware,
        Weights,
        cache_size,
        card_budget,
        causal_pairs,
        format_bytes,
        gallery_model,
        load_gallery,
        max_sequences,
        max_tokens,
        parse_bytes,
        pool_layout,
        preset,
        step_flops,
        step_traffic,
        storage_bytes,
        store_format,
    )
    from kvbook.cache import (
        FLOAT4,
        FLOAT8,
        INT4,
        INT8,
        NOT_A_TOKEN,
        BlockPool,
        BlockTable,
        BoundPaged,
        CacheGroup,
        Codec,
        CodedStore,
        Contiguous,
        DenseStore,
        DirectGroup,
        KVCache,
        KVView,
        LayerKind,
        Paged,
        Placement,
        PrefixCache,
        Ring,
        SlotMajorStore,
        Store,
        TailedGroup,
        new_bound_cache,
        new_cache,
        new_paged_cache,
        quantized,
        visible,
        visible_count,
    )
    from kvbook.config import LLAMA_3_8B, LatentConfig, ModelConfig, RopeScaling
    from kvbook.errors import (
        BlockNotInUseError,
        CacheFullError,
        DownloadError,
        OutOfBlocksError,
        SequenceEndedError,
        UnfinishedStepError,
        UnsupportedModelError,
        WeightFileError,
    )
    from kvbook.generate import (
        Acceptance,
        Draft,
        ModelDraft,
        PromptLookup,
        Proposal,
        Sampler,
        Speculation,
        accept_drafts,
        first_layers,
        generate_cached,
        generate_naive,
        generate_with_prefix,
        greedy,
        left_pad,
        one_hot,
        speculate,
        speculate_with_prefix,
        stream_cached,
        stream_naive,
        stream_with_prefix,
    )
    from kvbook.measure import (
        compare,
        count_bytes,
        count_flops,
        measure_generation,
        measure_step,
        probe,
    )
    from kvbook.model.attention import attend
    from kvbook.model.experiment import (
        attend_with,
        evaluate_with,
        move_positions,
        verdict,
        with_window,
    )
    from kvbook.model.influence import dependencies, visibility
    from kvbook.model.latent import absorbed, materialized
    from kvbook.model.loss import token_losses
    from kvbook.model.sample import sample_text
    from kvbook.model.tiles import attend_by_tiles
    from kvbook.model.tokenizer import (
        Tokenizer,
        load_smollm2_tokenizer,
        load_tokenizer,
        smollm2_chat,
    )
    from kvbook.model.toy import toy_model
    from kvbook.model.trace import cached_entries, hidden_states, logits_in_pieces
    from kvbook.model.transformer import Transformer
    from kvbook.model.weights import load_folder, load_smollm2

_HOME = {
    "kvbook.accounting": [
        "POLICIES", "PRESETS", "CacheGeometry", "CacheSize", "Hardware", "Weights", "cache_size",
        "card_budget", "causal_pairs", "format_bytes", "gallery_model", "load_gallery",
        "max_sequences", "max_tokens", "parse_bytes", "pool_layout", "preset", "step_flops",
        "step_traffic", "storage_bytes", "store_format",
    ],
    "kvbook.cache": [
        "FLOAT4", "FLOAT8", "INT4", "INT8", "NOT_A_TOKEN", "BlockPool", "BlockTable", "BoundPaged",
        "CacheGroup", "Codec", "CodedStore", "Contiguous", "DenseStore", "DirectGroup", "KVCache",
        "KVView", "LayerKind", "Paged", "Placement", "PrefixCache", "Ring", "SlotMajorStore",
        "Store", "TailedGroup", "new_bound_cache", "new_cache", "new_paged_cache", "quantized",
        "visible", "visible_count",
    ],
    "kvbook.config": ["LLAMA_3_8B", "LatentConfig", "ModelConfig", "RopeScaling"],
    "kvbook.errors": [
        "BlockNotInUseError", "CacheFullError", "DownloadError", "OutOfBlocksError",
        "SequenceEndedError", "UnfinishedStepError", "UnsupportedModelError", "WeightFileError",
    ],
    "kvbook.generate": [
        "Acceptance", "Draft", "ModelDraft", "PromptLookup", "Proposal", "Sampler", "Speculation",
        "accept_drafts", "first_layers", "generate_cached", "generate_naive",
        "generate_with_prefix", "greedy", "left_pad", "one_hot", "speculate",
        "speculate_with_prefix", "stream_cached", "stream_naive", "stream_with_prefix",
    ],
    "kvbook.measure": [
        "compare", "count_bytes", "count_flops", "measure_generation", "measure_step", "probe",
    ],
    "kvbook.model.attention": ["attend"],
    "kvbook.model.experiment": [
        "attend_with", "evaluate_with", "move_positions", "verdict", "with_window",
    ],
    "kvbook.model.latent": ["absorbed", "materialized"],
    "kvbook.model.loss": ["token_losses"],
    "kvbook.model.influence": ["dependencies", "visibility"],
    "kvbook.model.sample": ["sample_text"],
    "kvbook.model.tokenizer": [
        "Tokenizer", "load_smollm2_tokenizer", "load_tokenizer", "smollm2_chat",
    ],
    "kvbook.model.tiles": ["attend_by_tiles"],
    "kvbook.model.toy": ["toy_model"],
    "kvbook.model.trace": ["cached_entries", "hidden_states", "logits_in_pieces"],
    "kvbook.model.transformer": ["Transformer"],
    "kvbook.model.weights": ["load_folder", "load_smollm2"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvbook' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
