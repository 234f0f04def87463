"""What caching costs: bytes, operations, traffic and least times, in exact integers, no torch."""

from kvbook.accounting.budget import max_sequences, max_tokens
from kvbook.accounting.card import CardBudget, Weights, card_budget
from kvbook.accounting.flops import Flops, attention_flops, causal_pairs, step_flops
from kvbook.accounting.formats import FORMATS, Format, parse_format, store_format
from kvbook.accounting.gallery import GalleryModel, gallery_model, load_gallery
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.hardware import Bound, Hardware
from kvbook.accounting.layers import (
    Kept,
    Layer,
    empty_layer,
    full_layer,
    latent_layer,
    recurrent_layer,
    window_layer,
)
from kvbook.accounting.need import CacheSize, cache_size
from kvbook.accounting.policies import POLICIES, Policy
from kvbook.accounting.pool import PoolLayout, pool_layout
from kvbook.accounting.presets import PRESETS, preset
from kvbook.accounting.storage import storage_bytes
from kvbook.accounting.traffic import Traffic, intensity, step_traffic
from kvbook.accounting.units import format_bytes, parse_bytes, parse_count

__all__ = [
    "FORMATS",
    "POLICIES",
    "PRESETS",
    "Bound",
    "CacheGeometry",
    "CacheSize",
    "CardBudget",
    "Flops",
    "Format",
    "GalleryModel",
    "Hardware",
    "Kept",
    "Layer",
    "Policy",
    "PoolLayout",
    "Traffic",
    "Weights",
    "attention_flops",
    "cache_size",
    "card_budget",
    "causal_pairs",
    "empty_layer",
    "format_bytes",
    "full_layer",
    "gallery_model",
    "intensity",
    "latent_layer",
    "load_gallery",
    "max_sequences",
    "max_tokens",
    "parse_bytes",
    "parse_count",
    "parse_format",
    "pool_layout",
    "preset",
    "recurrent_layer",
    "step_flops",
    "step_traffic",
    "storage_bytes",
    "store_format",
    "window_layer",
]
