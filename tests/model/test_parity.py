"""kvbook computes what the ``transformers`` library computes, for every supported architecture.

The models are tiny and random. In float64, with the reference's own float32 upcasts replaced, the
logits agree to 1e-9; in float32, with the reference as it is, to 1e-4. The comparison is not
vacuous: logits vary by more than 1, and each deliberately wrong variant is seen.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles.reference import (
    BY_NAME,
    CASES,
    DEEPSEEK_YARN_ROPE,
    YARN_ROPE,
    Case,
    in_float64,
    save,
)
from torch import Tensor

from kvbook.model.experiment import evaluate_with
from kvbook.model.latent import materialized
from kvbook.model.transformer import Transformer
from kvbook.model.weights import load_folder

pytestmark = pytest.mark.usefixtures("one_thread")

LATENT_CASES = [case for case in CASES if case.name.startswith("deepseek")]
WINDOWED_CASES = [BY_NAME["mistral-window"]] + [
    case for case in CASES if "layer_types" in case.changes
]
B, T = 2, 23
TOKENS = torch.randint(0, 97, (B, T), generator=torch.Generator().manual_seed(1))
CHUNKS = {
    "prefill-then-decode": [11] + [1] * 12,
    "token-by-token": [1] * 23,
    "chunks-of-4": [4, 4, 4, 4, 4, 3],
    "uneven": [1, 7, 2, 9, 1, 3],
    "one-call": [23],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {case.name: save(case.build(), root / case.name) for case in CASES}


@pytest.fixture(scope="module")
def exact(folders: dict[str, Path]) -> dict[str, Tensor]:
    """The reference's logits in float64."""
    return {case.name: logits_of(in_float64(case.build())) for case in CASES}


@torch.no_grad()
def logits_of(reference: torch.nn.Module) -> Tensor:
    return reference(TOKENS, use_cache=False).logits


@torch.no_grad()
def in_chunks(model: Transformer, sizes: list[int]) -> Tensor:
    cache = model.new_cache(B, capacity=T)
    return torch.cat([model(part, cache) for part in TOKENS.split(sizes, 1)], 1)


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape == (B, T, 97)
    return (a - b).abs().max().item()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_pass_without_a_cache(case: Case, folders, exact) -> None:
    model = load_folder(folders[case.name], dtype=torch.float64)
    assert difference(model(TOKENS), exact[case.name]) <= 1e-9


@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_passes_over_a_cache(case: Case, sizes: list[int], folders, exact) -> None:
    model = load_folder(folders[case.name], dtype=torch.float64)
    assert difference(in_chunks(model, sizes), exact[case.name]) <= 1e-9


@pytest.mark.parametrize("case", WINDOWED_CASES, ids=str)
def test_rings_agree_as_well(case: Case, folders, exact) -> None:
    """Layers with a window keep only what they see, and the three tokens that may be taken back."""
    model = load_folder(folders[case.name], dtype=torch.float64)
    for sizes in CHUNKS.values():
        cache = model.new_cache(B, T, rollback=3)
        assert cache.allocated_bytes < model.new_cache(B, T).allocated_bytes
        logits = torch.cat([model(part, cache) for part in TOKENS.split(sizes, 1)], 1)
        assert difference(logits, exact[case.name]) <= 1e-9


@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_the_materialized_form_agrees_as_well(case: Case, folders, exact) -> None:
    """The form that is absorbed is the one of the tests above."""
    model = evaluate_with(load_folder(folders[case.name], dtype=torch.float64), materialized)
    assert difference(model(TOKENS), exact[case.name]) <= 1e-9
    for sizes in CHUNKS.values():
        assert difference(in_chunks(model, sizes), exact[case.name]) <= 1e-9


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_against_the_reference_as_it_is(case: Case, folders) -> None:
    expected = logits_of(case.build())
    model = load_folder(folders[case.name])
    assert model.dtype == torch.float32
    assert difference(model(TOKENS), expected) <= 1e-4
    for sizes in CHUNKS.values():
        assert difference(in_chunks(model, sizes), expected) <= 1e-4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_logits_vary_enough_to_tell_models_apart(case: Case, exact) -> None:
    logits = exact[case.name]
    assert logits.std() > 1
    assert (logits.amax(-1) - logits.amin(-1)).min() > 1
    assert not torch.allclose(logits[:, 0], logits[:, -1])


def test_the_reference_as_it_is_would_not_agree_to_1e_9(folders, exact) -> None:
    """Without the two replacements a float64 reference is only as good as float32."""
    assert 1e-9 < difference(logits_of(BY_NAME["qwen3"].build().double()), exact["qwen3"]) < 1e-3


# Wrong variants: each is one mistake that a loader or a model could make.


def swap_q_and_k(model: Transformer) -> None:
    for block in model.blocks:
        weight = block.attention.qkv.weight
        weight.copy_(torch.cat([weight[32:64], weight[:32], weight[64:]]))


def swap_k_and_v(model: Transformer) -> None:
    for block in model.blocks:
        weight = block.attention.qkv.weight
        weight.copy_(torch.cat([weight[:32], weight[48:64], weight[32:48]]))


def tile_heads_instead_of_repeating(model: Transformer) -> None:
    """Query heads 0, 1, 2, 3 read KV heads 0, 1, 0, 1 instead of 0, 0, 1, 1."""
    for block in model.blocks:
        rows, columns = block.attention.qkv.weight, block.attention.output.weight
        rows[:32] = rows[:32].view(4, 8, 32)[[0, 2, 1, 3]].reshape(32, 32)
        columns.copy_(columns.view(32, 4, 8)[:, [0, 2, 1, 3]].reshape(32, 32))


def pair_neighbors_in_rope(model: Transformer) -> None:
    """The rows of q and k in the order that rotates neighbors rather than halves."""
    for block in model.blocks:
        rows = block.attention.qkv.weight[:48].view(6, 2, 4, 32)
        block.attention.qkv.weight[:48] = rows.transpose(1, 2).reshape(48, 32)


def swap_gate_and_up(model: Transformer) -> None:
    for block in model.blocks:
        block.mlp.gate_up.weight.copy_(block.mlp.gate_up.weight.roll(56, 0))


def forget_the_norm_weights(model: Transformer) -> None:
    model.blocks[0].mlp_norm.weight.fill_(1)


def forget_the_bias(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.qkv.bias.zero_()


def forget_the_value_bias(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.qkv.bias[48:] = 0


def swap_the_head_norms(model: Transformer) -> None:
    for block in model.blocks:
        q, k = block.attention.q_norm.weight, block.attention.k_norm.weight
        a, b = q.clone(), k.clone()
        q[0], k[0] = b[0], a[0]


def tie_the_head(model: Transformer) -> None:
    model.head.weight.copy_(model.embedding.weight)


def pair_neighbors_in_latent_rope(model: Transformer) -> None:
    """The shared rotated key in the order that rotates neighbors, the queries by halves."""
    for block in model.blocks:
        rows = block.attention.latent_down.weight
        rows[12:] = rows[12:].view(2, 4, 32).transpose(0, 1).reshape(8, 32)


def swap_the_parts_of_a_head(model: Transformer) -> None:
    """A head's rows as value (10) then key (6) instead of key then value."""
    for block in model.blocks:
        heads = block.attention.latent_up.weight.view(4, 16, 12)
        heads.copy_(heads.roll(-6, 1))


def forget_the_query_norm(model: Transformer) -> None:
    model.blocks[0].attention.query_norm.weight.fill_(1)


def forget_the_latent_norm(model: Transformer) -> None:
    model.blocks[0].attention.latent_norm.weight.fill_(1)


def scale_by_the_latent_width(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.scale = 20**-0.5


def scale_without_yarn(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.scale = 14**-0.5


def window_every_layer(model: Transformer) -> None:
    """All layers local, where some are global."""
    model.config = replace(model.config, window=5)


def shift_the_pattern(model: Transformer) -> None:
    """As many local layers, one place off."""
    first, *rest = model.config.windows
    model.config = replace(model.config, window=(*rest, first))


WRONG = [
    ("llama-mha", swap_q_and_k),
    ("llama-gqa", swap_k_and_v),
    ("llama-gqa", tile_heads_instead_of_repeating),
    ("llama-gqa", pair_neighbors_in_rope),
    ("llama-gqa", swap_gate_and_up),
    ("llama-gqa", forget_the_norm_weights),
    ("llama-gqa", tie_the_head),
    ("qwen2", forget_the_bias),
    ("qwen2", forget_the_value_bias),
    ("qwen3", swap_the_head_norms),
    ("deepseek-v2", pair_neighbors_in_latent_rope),
    ("deepseek-v3-halves", pair_neighbors_in_latent_rope),
    ("deepseek-v2", swap_the_parts_of_a_head),
    ("deepseek-v2", forget_the_query_norm),
    ("deepseek-v2", forget_the_latent_norm),
    ("deepseek-v3", scale_by_the_latent_width),
    ("deepseek-v3-yarn", scale_without_yarn),
    ("qwen2-local-first", window_every_layer),
    ("qwen2-local-first", shift_the_pattern),
    ("qwen3-alternating", shift_the_pattern),
]


@pytest.mark.parametrize(("name", "spoil"), WRONG, ids=[f"{n}-{f.__name__}" for n, f in WRONG])
def test_a_wrong_variant_is_seen(
    name: str, spoil: Callable[[Transformer], None], folders, exact
) -> None:
    model = load_folder(folders[name], dtype=torch.float64)
    with torch.no_grad():
        spoil(model)
    assert difference(model(TOKENS), exact[name]) > 1e-2


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mistral-window", {"sliding_window": 4}),
        ("mistral-window", {"sliding_window": 6}),
        ("mistral-window", {"sliding_window": None}),
        ("llama-gqa", {"rms_norm_eps": 1e-5}),
        ("deepseek-v3", {"rope_interleave": False}),
        ("deepseek-v3-halves", {"rope_interleave": True}),
        ("deepseek-v3-yarn", {"rope_parameters": {**DEEPSEEK_YARN_ROPE, "mscale": 0.7}}),
        ("deepseek-v3-yarn", {"rope_parameters": {**DEEPSEEK_YARN_ROPE, "mscale_all_dim": 1.3}}),
        ("deepseek-v3-yarn", {"rope_parameters": {**DEEPSEEK_YARN_ROPE, "beta_fast": 1.0}}),
        ("llama-yarn", {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.0}}),
        ("llama-gqa", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
        ("llama-llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        (
            "llama-llama3",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 100.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 2.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
    ],
)
def test_a_wrong_setting_is_seen(name: str, fields: dict, folders, exact, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[name], tmp_path / name))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    model = load_folder(folder, dtype=torch.float64)
    assert difference(model(TOKENS), exact[name]) > 1e-4
