"""Every model of the gallery: the bytes in the file, worked out apart, are what the code finds."""

import json
from time import perf_counter

import pytest

from kvbook.accounting.gallery import FILE, gallery_model, load_gallery
from kvbook.accounting.need import cache_size

NAMES = [entry["name"] for entry in json.loads(FILE.read_text())]

# Written out once more, so that neither the file nor the code can change alone:
# bytes per token, per token beyond windows, windows when full, at 131,072 tokens, all 16-bit.
BYTES = {
    "qwen3.5-35b-a3b": (20_480, 20_480, 0, 2_684_354_560),
    "qwen3.5-27b": (65_536, 65_536, 0, 8_589_934_592),
    "gpt-oss-120b": (73_728, 36_864, 4_718_592, 4_836_556_800),
    "qwen3.5-122b-a10b": (24_576, 24_576, 0, 3_221_225_472),
    "qwen3.5-397b-a17b": (30_720, 30_720, 0, 4_026_531_840),
    "gemma-4-26b-a4b": (225_280, 20_480, 209_715_200, 2_894_069_760),
    "gemma-4-31b": (901_120, 81_920, 838_860_800, 11_576_279_040),
    "deepseek-v4-flash": (50_912, 6_880, 5_636_096, 907_411_456),
    "deepseek-v3.2": (85_888, 85_888, 0, 11_257_511_936),
    "kimi-k2.5": (70_272, 70_272, 0, 9_210_691_584),
    "kimi-k3": (27_648, 27_648, 0, 3_623_878_656),
    "glm-5": (109_824, 109_824, 0, 14_394_851_328),
    "glm-4.5": (376_832, 376_832, 0, 49_392_123_904),
    "minimax-m2.5": (253_952, 253_952, 0, 33_285_996_544),
    "mimo-v2-flash": (222_720, 23_040, 25_559_040, 3_045_457_920),
    "step-3.7-flash": (184_320, 49_152, 69_206_016, 6_511_656_960),
    "nemotron-3-nano-30b-a3b": (6_144, 6_144, 0, 805_306_368),
    "nemotron-3-super-120b-a12b": (8_192, 8_192, 0, 1_073_741_824),
    "llama-4-scout": (196_608, 49_152, 1_207_959_552, 7_650_410_496),
    "llama-4-maverick": (196_608, 49_152, 1_207_959_552, 7_650_410_496),
    "qwen3-next-80b-a3b": (24_576, 24_576, 0, 3_221_225_472),
    "qwen3-coder-480b-a35b": (253_952, 253_952, 0, 33_285_996_544),
    "qwen3-32b": (262_144, 262_144, 0, 34_359_738_368),
    "gemma-3n-e4b": (40_960, 8_192, 16_777_216, 1_090_519_040),
    "mistral-small-3.1-24b": (163_840, 163_840, 0, 21_474_836_480),
    "ministral-3-8b": (139_264, 139_264, 0, 18_253_611_008),
    "smollm3-3b": (73_728, 73_728, 0, 9_663_676_416),
    "gpt-oss-20b": (49_152, 24_576, 3_145_728, 3_224_371_200),
    "qwen3-8b": (147_456, 147_456, 0, 19_327_352_832),
    "qwen3-30b-a3b": (98_304, 98_304, 0, 12_884_901_888),
    "qwen3-235b-a22b": (192_512, 192_512, 0, 25_232_932_864),
    "gemma-3-27b": (507_904, 81_920, 436_207_616, 11_173_625_856),
    "gemma-3-1b": (26_624, 4_096, 11_534_336, 548_405_248),
    "llama-3.1-8b": (131_072, 131_072, 0, 17_179_869_184),
    "llama-3.1-70b": (327_680, 327_680, 0, 42_949_672_960),
    "llama-3.2-1b": (32_768, 32_768, 0, 4_294_967_296),
    "deepseek-v3": (70_272, 70_272, 0, 9_210_691_584),
    "kimi-k2": (70_272, 70_272, 0, 9_210_691_584),
    "smollm2-135m": (23_040, 23_040, 0, 3_019_898_880),
    "llama-3-8b": (131_072, 131_072, 0, 17_179_869_184),
    "llama-3-70b": (327_680, 327_680, 0, 42_949_672_960),
    "mistral-7b-v0.1": (131_072, 0, 536_870_912, 536_870_912),
    "mixtral-8x7b": (131_072, 131_072, 0, 17_179_869_184),
    "qwen2-7b": (57_344, 57_344, 0, 7_516_192_768),
    "qwen2.5-0.5b": (12_288, 12_288, 0, 1_610_612_736),
    "gemma-2-27b": (376_832, 188_416, 771_751_936, 25_467_813_888),
    "phi-3-mini-4k": (393_216, 0, 804_913_152, 804_913_152),
    "phi-3-mini-128k": (393_216, 0, 103_079_215_104, 51_539_607_552),
    "deepseek-v2-lite": (31_104, 31_104, 0, 4_076_863_488),
    "deepseek-v2": (69_120, 69_120, 0, 9_059_696_640),
    "minimax-text-01": (40_960, 40_960, 0, 5_368_709_120),
    "jamba-v0.1": (16_384, 16_384, 0, 2_147_483_648),
    "command-r-v01": (1_310_720, 1_310_720, 0, 171_798_691_840),
    "qwen1.5-72b": (2_621_440, 2_621_440, 0, 343_597_383_680),
    "falcon-7b": (8_192, 8_192, 0, 1_073_741_824),
    "llama-2-70b": (327_680, 327_680, 0, 42_949_672_960),
    "llama-2-7b": (524_288, 524_288, 0, 68_719_476_736),
    "opt-13b": (819_200, 819_200, 0, 107_374_182_400),
    "opt-6.7b": (524_288, 524_288, 0, 68_719_476_736),
    "gpt2-xl": (307_200, 307_200, 0, 40_265_318_400),
    "gpt2": (36_864, 36_864, 0, 4_831_838_208),
}

# Kinds of layers, where they are not all full.
LAYERS = {
    "qwen3.5-35b-a3b": {"full": 10, "recurrent": 30},
    "qwen3.5-27b": {"full": 16, "recurrent": 48},
    "qwen3.5-122b-a10b": {"full": 12, "recurrent": 36},
    "qwen3.5-397b-a17b": {"full": 15, "recurrent": 45},
    "qwen3-next-80b-a3b": {"full": 12, "recurrent": 36},
    "gpt-oss-120b": {"full": 18, "window": 18},
    "gemma-4-26b-a4b": {"full": 5, "window": 25},
    "gemma-4-31b": {"full": 10, "window": 50},
    "gemma-3n-e4b": {"full": 4, "window": 16, "shared": 15},
    "deepseek-v4-flash": {"window": 43, "compressed": 41, "recurrent": 41},
    "deepseek-v3.2": {"latent": 61},
    "kimi-k2.5": {"latent": 61},
    "kimi-k3": {"latent": 24, "recurrent": 69},
    "glm-5": {"latent": 78},
    "mimo-v2-flash": {"full": 9, "window": 39},
    "step-3.7-flash": {"full": 12, "window": 33},
    "nemotron-3-nano-30b-a3b": {"full": 6, "recurrent": 23, "none": 23},
    "nemotron-3-super-120b-a12b": {"full": 8, "recurrent": 40, "none": 40},
    "llama-4-scout": {"full": 12, "chunk": 36},
    "llama-4-maverick": {"full": 12, "chunk": 36},
    "mistral-7b-v0.1": {"window": 32},
    "gemma-2-27b": {"full": 23, "window": 23},
    "gemma-3-1b": {"full": 4, "window": 22},
    "gemma-3-27b": {"full": 10, "window": 52},
    "gpt-oss-20b": {"full": 12, "window": 12},
    "phi-3-mini-4k": {"window": 32},
    "phi-3-mini-128k": {"window": 32},
    "deepseek-v2-lite": {"latent": 27},
    "deepseek-v2": {"latent": 60},
    "deepseek-v3": {"latent": 61},
    "kimi-k2": {"latent": 61},
    "jamba-v0.1": {"full": 4, "recurrent": 28},
    "minimax-text-01": {"full": 10, "recurrent": 70},
}

EXPANDED = {
    "deepseek-v2-lite": 276_480, "deepseek-v2": 4_915_200, "deepseek-v3": 4_997_120,
    "kimi-k2": 2_498_560, "kimi-k2.5": 2_498_560, "kimi-k3": 1_474_560, "deepseek-v3.2": 5_012_736,
    "glm-5": 5_131_776,
}  # fmt: skip


def test_the_file_has_these_models() -> None:
    assert list(BYTES) == NAMES == list(load_gallery())


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name: str) -> None:
    size = cache_size(gallery_model(name).geometry, 131_072)
    assert BYTES[name] == (
        size.bytes_per_token,
        size.bytes_per_token_beyond_windows,
        size.window_bytes_full,
        size.need_bytes,
    )


@pytest.mark.parametrize("name", BYTES)
def test_bytes_in_the_file(name: str) -> None:
    model = gallery_model(name)
    at = {n: cache_size(model.geometry, n) for n in (4096, 32_768, 131_072)}
    assert model.bytes == {
        "bytes_per_token": at[4096].bytes_per_token,
        "bytes_per_token_beyond_windows": at[4096].bytes_per_token_beyond_windows,
        "window_bytes_full": at[4096].window_bytes_full,
        "bytes_at_4096": at[4096].need_bytes,
        "bytes_at_32768": at[32_768].need_bytes,
        "bytes_at_131072": at[131_072].need_bytes,
        "expanded_bytes_per_token": at[4096].expanded_bytes_per_token,
    }
    assert model.bytes["expanded_bytes_per_token"] == EXPANDED.get(name)


@pytest.mark.parametrize("name", BYTES)
def test_kinds_of_layers(name: str) -> None:
    geometry = gallery_model(name).geometry
    found = {layer.kind: geometry.count(layer.kind) for layer in geometry.layers}
    assert found == LAYERS.get(name, {"full": len(geometry.layers)})


def test_which_layers() -> None:
    def full(name: str) -> list[int]:
        layers = gallery_model(name).geometry.layers
        return [i for i, layer in enumerate(layers) if layer.kind == "full"]

    assert full("gemma-3-1b") == [5, 11, 17, 23]
    assert full("gemma-2-27b")[:3] == full("gpt-oss-20b")[:3] == [1, 3, 5]
    assert full("jamba-v0.1") == [4, 12, 20, 28]
    assert full("minimax-text-01") == [7, 15, 23, 31, 39, 47, 55, 63, 71, 79]


@pytest.mark.parametrize("name", BYTES)
def test_every_model_says_where_it_comes_from(name: str) -> None:
    model = gallery_model(name)
    assert model.source
    assert model.geometry.max_positions


def test_what_is_run_today_comes_first_and_history_last() -> None:
    assert NAMES[:3] == ["qwen3.5-35b-a3b", "qwen3.5-27b", "gpt-oss-120b"]
    assert NAMES[-2:] == ["gpt2-xl", "gpt2"]
    assert NAMES.index("llama-3.1-8b") < NAMES.index("llama-3-8b") < NAMES.index("llama-2-7b")


@pytest.mark.parametrize("name", BYTES)
def test_an_answer_takes_less_than_a_millisecond(name: str) -> None:
    def seconds() -> float:
        start = perf_counter()
        size = cache_size(gallery_model(name).geometry, 32_768, batch=8)
        _ = (
            size.need, size.reservation, size.bytes_per_token, size.window_bytes_full,
            size.bytes_per_token_beyond_windows, size.constant_state_bytes,
            size.expanded_bytes_per_token, size.block_table_bytes, size.assumptions,
            size.exclusions,
        )  # fmt: skip
        return perf_counter() - start

    assert min(seconds() for _ in range(10)) < 1e-3


def test_names_and_titles_in_any_case() -> None:
    assert gallery_model("Llama-3.1-8B").name == "llama-3.1-8b"
    assert gallery_model(" deepseek-v3 / r1").name == "deepseek-v3"


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ValueError, match=r"'llama3.1-8b'.*did you mean llama-3.1-8b"):
        gallery_model("llama3.1-8b")
    with pytest.raises(ValueError, match=r"'zzzz'.*kvbook models"):
        gallery_model("zzzz")
