"""What caching costs: bytes, operations, traffic and least times, in exact integers, no torch."""

from kvbook.accounting.budget import max_sequences, max_tokens
from kvbook.accounting.flops import Flops, attention_flops, causal_pairs, step_flops
from kvbook.accounting.formats import FORMATS, Format, parse_format
from kvbook.accounting.gallery import GalleryModel, gallery_model, load_gallery
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.hardware import PRESETS, Bound, Hardware
from kvbook.accounting.layers import (
    Kept,
    Layer,
    empty_layer,
    full_layer,
    latent_layer,
    recurrent_layer,
    window_layer,
)
from kvbook.accounting.size import CacheSize, cache_size
from kvbook.accounting.storage import storage_bytes
from kvbook.accounting.traffic import Traffic, intensity, step_traffic
from kvbook.accounting.units import format_bytes, parse_bytes

__all__ = [
    "FORMATS",
    "PRESETS",
    "Bound",
    "CacheGeometry",
    "CacheSize",
    "Flops",
    "Format",
    "GalleryModel",
    "Hardware",
    "Kept",
    "Layer",
    "Traffic",
    "attention_flops",
    "cache_size",
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
    "parse_format",
    "recurrent_layer",
    "step_flops",
    "step_traffic",
    "storage_bytes",
    "window_layer",
]
