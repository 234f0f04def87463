"""SmolLM2-135M-Instruct: kvbook and the ``transformers`` library, on the same released weights.

The reference reads the file by the library's own code: its GGUF reader, its order of the rows of q
and k, its model. Its sizes are written out here.
"""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvbook import ModelConfig, generate_cached, load_smollm2, load_smollm2_tokenizer
from kvbook.model.download import smollm2_gguf
from kvbook.model.gguf_file import GGUFFile
from kvbook.model.tokenizer import Tokenizer, smollm2_chat
from kvbook.model.transformer import Transformer

PROMPTS = [
    smollm2_chat([{"role": "user", "content": "What is the capital of France?"}]),
    smollm2_chat([{"role": "user", "content": "Explain why the sky is blue in three sentences."}]),
    "The quick brown fox jumps over the lazy dog. Once upon a time, there was a little",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return smollm2_gguf()


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_smollm2()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_smollm2_tokenizer()


@pytest.fixture(scope="module")
def reference(path: Path) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,  # generate 64 tokens whatever they are
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    left = model.load_state_dict(loaded["tensors"], strict=False)
    assert left.missing_keys == ["lm_head.weight"]  # tied to the embedding
    assert left.unexpected_keys == []
    return model


def test_the_sizes_are_those_that_were_released(model: Transformer) -> None:
    assert model.config.norm_eps == pytest.approx(1e-5, rel=1e-6)  # the file keeps it as float32
    assert replace(model.config, norm_eps=1e-5) == ModelConfig(
        vocab_size=49_152,
        d_model=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        d_mlp=1536,
        max_positions=8192,
        norm_eps=1e-5,
        rope_theta=100_000.0,
        tied_embeddings=True,
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_the_file_reads_as_the_gguf_package_reads_it(path: Path) -> None:
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    shapes = {tensor.name: tuple(map(int, tensor.shape[::-1])) for tensor in theirs.tensors}
    assert ours.shapes == shapes
    for tensor in theirs.tensors[:10]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert torch.equal(ours.read(tensor.name), torch.tensor(expected)), tensor.name


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.no_grad()
def test_logits(prompt: str, model, tokenizer, reference) -> None:
    tokens = torch.tensor([tokenizer.encode(prompt)])
    expected = reference(tokens, use_cache=False).logits
    assert expected.std() > 1
    assert (model(tokens) - expected).abs().max() <= 1e-3

    cache = model.new_cache(1, capacity=tokens.shape[1])
    split = [tokens.shape[1] - 4, 1, 1, 1, 1]
    cached = torch.cat([model(part, cache) for part in tokens.split(split, 1)], 1)
    assert (cached - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.no_grad()
def test_greedy_text_of_64_tokens(prompt: str, model, tokenizer, reference) -> None:
    """Each token that kvbook chose is the reference's own choice after the same text.

    By induction that is the reference's greedy text, found in one pass instead of 64.
    """
    ids = tokenizer.encode(prompt)
    (found,) = generate_cached(model, [ids], 64)
    assert len(found) == 64
    logits = reference(torch.tensor([ids + found]), use_cache=False).logits[0]
    assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == found


def test_greedy_text_from_the_generation_loop_of_the_library(model, tokenizer, reference) -> None:
    ids = tokenizer.encode(PROMPTS[2])
    tokens = torch.tensor([ids])
    text = reference.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=64, do_sample=False
    )
    (found,) = generate_cached(model, [ids], 64)
    assert text[0].tolist() == ids + found


def test_it_answers(model: Transformer, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPTS[0])
    (answer,) = generate_cached(model, [prompt], 20, stop_tokens=tokenizer.stop_tokens)
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_loading_again_gives_the_same_numbers_in_another_dtype(model: Transformer) -> None:
    half = load_smollm2(dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(model.named_parameters(), half.named_parameters(), strict=True):
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.to(torch.bfloat16), b), name
