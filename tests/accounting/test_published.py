"""Published figures: those that agree, and those that do not, with the mistake that made them.

Each figure stands as it was printed. A mistake is computed as it was made, so that its size is
explained and not asserted away.
"""

from fractions import Fraction

import pytest

from kvbook.accounting.gallery import gallery_model
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layers import full_layer
from kvbook.accounting.need import cache_size

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def need(name: str, tokens: int, batch: int = 1, dtype: str = "bf16") -> int:
    return cache_size(gallery_model(name).geometry, tokens, batch, dtype).need_bytes


AGREE = [
    # model, tokens, printed figure, its unit, decimals printed
    ("gpt2-xl", 1, "300", KIB),
    ("opt-13b", 1, "800", KIB),  # printed as KB
    ("llama-2-7b", 4_196, "2.05", GIB),  # printed as GB
    ("llama-3-8b", 2_048, "256", MIB),
    ("llama-3-70b", 2_048, "640", MIB),
    ("mixtral-8x7b", 2_048, "256", MIB),
    ("command-r-v01", 2_048, "2560", MIB),
    ("qwen2-7b", 2_048, "112", MIB),
    ("qwen1.5-72b", 32_848, "82120", MIB),
    ("llama-3.1-8b", 128_000, "15.62", GIB),  # printed as GB, and 128k
    ("llama-3.1-70b", 128_000, "39.06", GIB),
    ("llama-3.2-1b", 4_000, "125.0", MIB),  # printed as 4K
    ("mistral-7b-v0.1", 4_000, "500.0", MIB),
    ("qwen2-7b", 4_000, "218.8", MIB),
    ("deepseek-v3", 4_000, "268.1", MIB),
    ("qwen3-8b", 32_768, "4.5", GIB),
    ("qwen3-8b", 262_144, "36", GIB),
    ("gemma-3-1b", 32_768, "139", MIB),
    ("gemma-3-27b", 131_072, "10.41", GIB),
    ("deepseek-v3", 163_840, "10.72", GIB),
    ("kimi-k2", 262_144, "17.16", GIB),
    ("jamba-v0.1", 262_144, "4", GIB),
]


@pytest.mark.parametrize(("name", "tokens", "figure", "unit"), AGREE)
def test_a_figure_that_agrees(name: str, tokens: int, figure: str, unit: int) -> None:
    last_digit = Fraction(1, 10 ** len(figure.partition(".")[2]))
    assert abs(Fraction(need(name, tokens), unit) - Fraction(figure)) <= last_digit / 2


def test_windows_needed_and_reserved() -> None:
    """gpt-oss-20b at 8,192 tokens and batch 32: 6.09 GiB needed, 12.00 GiB reserved."""
    size = cache_size(gallery_model("gpt-oss-20b").geometry, 8_192, batch=32)
    assert round(size.need_bytes / GIB, 2) == 6.09
    assert size.reserved_bytes == 12 * GIB


def test_keys_of_one_device_of_four() -> None:
    """Qwen3-235B: 8.23 GB (of 1,024³) of keys for 367,404 tokens on each of 4 devices."""
    size = cache_size(gallery_model("qwen3-235b-a22b").geometry, 367_404, devices=4)
    assert round(size.need["keys"] / GIB, 2) == 8.23


def test_300_kib_are_not_gpt_2() -> None:
    assert need("gpt2", 1) == 36 * KIB


# ---- A head width that was derived (LMCache/LMCache#688, #2248)


def test_qwen3_30b_at_half_its_size() -> None:
    """Printed for 4,000 tokens: 187.5 MiB, with 2,048 / 32 = 64 for a width that is 128."""
    assert need("qwen3-30b-a3b", 4_000) == 375 * MIB
    derived = CacheGeometry("derived", (full_layer(4, 2_048 // 32, 2_048 // 32),) * 48)
    assert cache_size(derived, 4_000).need_bytes == Fraction("187.5") * MIB


def test_gemma_2_27b_an_eighth_too_large() -> None:
    """Printed for 4,000 tokens: 1.6 GiB, with 4,608 / 32 = 144 for a width that is 128."""
    assert round(need("gemma-2-27b", 4_000) / GIB, 3) == 1.404
    derived = CacheGeometry("derived", (full_layer(16, 144, 144),) * 46)
    assert round(cache_size(derived, 4_000).need_bytes / GIB, 1) == 1.6


# ---- A unit and a factor (ggml tools: gpustack/gguf-parser-go#8)


def test_deepseek_v3_without_its_layers() -> None:
    """65,536 tokens at 4 bits: 1,098.0 MiB. 17.9 MiB was expected: 572 for 576, and no layers."""
    assert need("deepseek-v3", 65_536, dtype="4bit") == 1_098 * MIB
    assert need("deepseek-v3", 65_536, dtype="4bit") // 61 == 18 * MIB
    assert round(65_536 * (512 + 60) * 4 // 8 / MIB, 1) == 17.9


def test_deepseek_v3_expanded() -> None:
    """Hundreds of GiB come from expanded keys and values: 71.1 times the latents."""
    size = cache_size(gallery_model("deepseek-v3").geometry, 65_536)
    assert size.expanded_bytes_per_token is not None
    assert 65_536 * size.expanded_bytes_per_token == 305 * GIB
    assert round(size.expanded_bytes_per_token / size.bytes_per_token, 1) == 71.1


# ---- Factors (jranaraki/vllm-fit#2, KolosalAI/model-memory-calculator#2, vllm-project/vllm#22291)


def test_qwen2_5_7b_times_its_query_heads() -> None:
    """57,344 B per token; 1,605,632 has a factor of 28 query heads too many."""
    assert need("qwen2-7b", 1) == 57_344
    assert need("qwen2-7b", 1) * 28 == 1_605_632


def test_qwen2_5_7b_by_its_model_width() -> None:
    """3,584 is 28 query heads of 128; there are 4 KV heads, so the answer is 7 times too large."""
    by_width = CacheGeometry("by width", (full_layer(1, 3_584, 3_584),) * 28)
    assert cache_size(by_width, 1).need_bytes == 401_408 == 7 * need("qwen2-7b", 1)


def test_eight_bits_are_not_eight_bytes() -> None:
    assert need("llama-3-8b", 4_096, dtype="8bit") * 8 == need("llama-3-8b", 4_096, dtype="64bit")


def test_llama_3_8b_by_query_heads() -> None:
    """A cache of 32 query heads would be 4 times as large as one of 8 KV heads."""
    by_query_heads = CacheGeometry("mistake", (full_layer(32, 128, 128),) * 32)
    assert cache_size(by_query_heads, 1).need_bytes == 4 * need("llama-3-8b", 1)


# ---- A default that is too wide (abetlen/llama-cpp-python#66)


def test_a_30b_llama_at_16_and_at_32_bits() -> None:
    """60 layers of 6,656 at 512 tokens: 780 MiB, or 1,560 where 32 bits are the default."""
    llama = CacheGeometry("30B", (full_layer(52, 128, 128),) * 60)
    assert cache_size(llama, 512).need_bytes == 780 * MIB
    assert cache_size(llama, 512, dtype="float32").need_bytes == 1_560 * MIB


# ---- Tables that disagree with themselves (unslothai/unsloth#4757, huggingface/blog llama31.md)


def test_the_405b_row_is_doubled() -> None:
    """Printed: 0.984 at 1k and 123.05 at 128k, twice the size; the rows beside it are right."""
    llama = CacheGeometry("Llama-3.1-405B", (full_layer(8, 128, 128),) * 126)
    at_1k, at_128k = (cache_size(llama, n).need_bytes for n in (1_024, 128_000))
    assert round(at_128k / GIB, 2) == 61.52
    assert round(2 * at_128k / GIB, 2) == 123.05
    assert round(2 * at_1k / GIB, 3) == 0.984


def test_one_k_is_1024_and_128_k_is_128000() -> None:
    """The same table, Llama-3.1-8B: 0.125 at 1k, 15.62 at 128k. With 131,072 it were 16."""
    assert need("llama-3.1-8b", 1_024) == GIB // 8
    assert need("llama-3.1-8b", 128_000) == Fraction("15.625") * GIB
    assert need("llama-3.1-8b", 131_072) == 16 * GIB


def test_a_prediction_layer_in_one_row_only() -> None:
    """DeepSeek-V3 at 163,840 tokens: 10.72 without its prediction layer, 10.90 with it."""
    with_it = 163_840 * (61 + 1) * 1_152
    assert round(with_it / GIB, 2) == 10.9
    assert round(need("deepseek-v3", 163_840) / GIB, 2) == 10.72


def test_gb_for_gib_is_seven_percent() -> None:
    assert GIB - 10**9 == 73_741_824


# ---- Sizes of the text


def test_memory_of_llama_3_8b() -> None:
    """The sizes that the chapters on cost begin with."""
    assert need("llama-3-8b", 1) == 128 * KIB
    assert need("llama-3-8b", 1, batch=16) == 2 * MIB
    assert need("llama-3-8b", 4_096) == 512 * MIB
    assert need("llama-3-8b", 4_096, batch=32) == 16 * GIB
    assert need("llama-3-8b", 8_192) == GIB
    assert need("llama-3-8b", 8_192, batch=4) == 4 * GIB


def test_memory_by_full_width() -> None:
    """32 layers of width 4,096 at 8,192 tokens: 4.29 GB, and 69 GB for sixteen."""
    assert round(need("llama-2-7b", 8_192) / 10**9, 2) == 4.29
    assert round(need("llama-2-7b", 8_192, batch=16) / 10**9) == 69
