"""The caches benchmark: what it prints, and that every kind holds what it should. No test looks
at a speed."""

import json

import pytest
import torch
from oracles.toys import toy

from benchmarks import caches
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXTS = (32, 96)


def model() -> Transformer:
    return toy(torch.float32, head_dim=32, max_positions=256)


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    caches.report(model, caches.KINDS, CONTEXTS, reps=1)

    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert list(result) == ["benchmark", "rows", "machine"]
    assert result["benchmark"] == "caches"
    assert [row["kind"] for row in result["rows"]] == [kind.name for kind in caches.KINDS]
    assert len(lines) == 2 + len(caches.KINDS) + 1
    for row in result["rows"]:
        assert row["path"] in ("kernel", "reference")
        assert all(row[f"{part}_ms_{n}"] > 0 for part in ("step", "attention") for n in CONTEXTS)
    base = result["rows"][0]
    assert base["step_ratio_32"] == base["attention_ratio_96"] == 1.0


def test_bytes_are_those_of_the_stores() -> None:
    """2 layers, 2 KV heads, keys and values of 32 elements: 256 elements per token."""
    found = caches.measure(model(), caches.KINDS, 96, reps=1)
    per_token = {name: row["bytes_per_token"] for name, row in found.items()}
    # float32: 4 bytes. int8: a byte and, per 32 elements, a scale of 4. int4: half a byte, a scale
    # and an offset of 4 each. float4: half a byte and one byte of scale.
    assert per_token["contiguous float32"] == 256 * 4 == per_token["paged float32"]
    assert per_token["contiguous int8"] == 256 + 8 * 4 == per_token["paged int8"]
    assert per_token["contiguous int4"] == 128 + 8 * 8
    assert per_token["contiguous float8"] == 256 + 8 * 4
    assert per_token["contiguous float4"] == 128 + 8
    # 96 tokens, of which the last 32 are in full.
    assert per_token["contiguous int4 + tail"] == (64 * (128 + 8 * 8) + 32 * 1024) / 96


@pytest.mark.parametrize("kind", caches.KINDS, ids=lambda kind: kind.name)
def test_every_kind_computes_what_the_contiguous_one_does(kind: caches.Kind) -> None:
    """To rounding where nothing is lost, roughly where the store is coded."""
    tokens = torch.randint(0, 29, (1, 40), generator=torch.Generator().manual_seed(1))
    logits, reader = [], model()
    for one in (caches.KINDS[0], kind):
        with caches.reading(reader, one):
            logits.append(reader(tokens, one.make(reader, 64)))
    exact = "float32" in kind.name
    assert (logits[0] - logits[1]).abs().mean() < (1e-4 if exact else 0.6 * logits[0].std())


def test_the_context_and_the_model_are_restored() -> None:
    kind = caches.KINDS[0]
    reader = model()
    cache = kind.make(reader, 64)
    caches.fill(cache, 32)
    tokens = torch.tensor([[3]])
    config = reader.config
    caches.step_seconds(reader, caches.KINDS[6], caches.KINDS[6].make(reader, 64), tokens)
    caches.step_seconds(reader, kind, cache, tokens)
    assert cache.lengths == (32,)
    assert reader.config is config
