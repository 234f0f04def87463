"""The decode benchmark: what it prints, and what it refuses to time. No test looks at a speed."""

import json
from typing import Any

import pytest
import torch
from oracles.toys import toy
from torch import Tensor

from benchmarks import decode
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [decode.Case("prefill", 2, 6), decode.Case("decode", 2, 6)]
# The shape of a model whose head width transformers derives as well.
SHAPE: dict[str, Any] = {"d_model": 24, "tied_embeddings": True}


@pytest.fixture
def model() -> Transformer:
    return toy(torch.float32, **SHAPE)


def contenders(model: Transformer, length: int) -> dict[str, decode.Contender]:
    """All contenders, holding the same ``length`` tokens in each of 2 rows."""
    past = decode.read_past(model, 2, length)
    made: dict[str, decode.Contender] = decode.make_contenders(model)
    for contender in made.values():
        contender.start(past, 6)
    return made


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    decode.report(lambda dtype: toy(dtype, **SHAPE), CASES, reps=1)

    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert list(result) == ["benchmark", "rows", "machine"]
    assert result["benchmark"] == "decode"
    assert [
        (row.pop("phase"), row.pop("batch"), row.pop("context"), row.pop("dtype"))
        for row in result["rows"]
    ] == [
        ("prefill", 2, 6, "float32"),
        ("decode", 2, 6, "float32"),
        ("prefill", 2, 6, "bfloat16"),
        ("decode", 2, 6, "bfloat16"),
    ]
    for row in result["rows"]:
        assert list(row) == [
            "kvbook_tok_s", "transformers_tok_s", "ratio", "floor_share", "hardwired_ratio"
        ]  # fmt: skip
        assert all(isinstance(x, float) and x > 0 for x in row.values())
    assert result["machine"]["threads"] == 1
    assert len(lines) == 2 + 4 + 1  # two lines of header, a line per row, the JSON line


@pytest.mark.parametrize("length", [0, 6])
def test_the_contenders_compute_the_same(model: Transformer, length: int) -> None:
    tokens = torch.tensor([[3], [7]]) if length else torch.tensor([[1, 2, 3], [7, 8, 9]])
    made = contenders(model, length)
    expected = made["kvbook"].step(tokens)
    for name in ("transformers", "hardwired"):
        assert torch.allclose(made[name].step(tokens), expected, atol=1e-4), name


def test_rewind_brings_the_context_back(model: Transformer) -> None:
    tokens = torch.tensor([[3], [7]])
    for name, contender in contenders(model, 6).items():
        first = contender.step(tokens)
        contender.step(tokens + 1)
        contender.rewind(6)
        assert torch.equal(contender.step(tokens), first), name


def test_a_contender_that_computes_something_else_is_not_timed(model: Transformer) -> None:
    made = contenders(model, 6)
    made["hardwired"].rewind(5)  # one token of the context is lost
    with pytest.raises(ValueError, match=r"hardwired and kvbook disagree.*standard deviations"):
        decode.check_logits(made, torch.tensor([[3], [7]]), 6)


def test_the_reference_shares_the_weights(model: Transformer) -> None:
    llama = decode.as_llama(model)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    theirs = {weight.untyped_storage().data_ptr() for weight in llama.parameters()}
    assert theirs == own


def test_the_floor_reads_as_many_bytes_as_the_cache_holds(model: Transformer) -> None:
    floor = contenders(model, 6)["floor"]
    assert isinstance(floor, decode.Floor)
    # 2 layers × keys and values × 2 rows × 2 heads × 6 tokens × 6 wide × 4 bytes
    assert sum(run.nbytes for run in floor.cached) == 2 * 2 * 2 * 2 * 6 * 6 * 4


def test_speeds_and_ratios_follow_from_the_times(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows, 4 steps: 8 tokens a repetition. Times are given, none is measured."""
    taken = {"Kvbook": 2.0, "Transformers": 3.0, "HardWired": 1.9, "Floor": 1.0}

    def seconds(contender: object, tokens: Tensor, steps: int, length: int) -> float:
        assert (tokens.shape, steps, length) == ((2, 1), 4, 6)
        return taken[type(contender).__name__]

    monkeypatch.setattr(decode, "seconds", seconds)
    row = decode.measure(model, decode.make_contenders(model), CASES[1], reps=3)
    assert row == {
        "phase": "decode", "batch": 2, "context": 6, "dtype": "float32",
        "kvbook_tok_s": 4.0, "transformers_tok_s": 2.67,
        "ratio": 1.5, "floor_share": 0.5, "hardwired_ratio": 0.95,
    }  # fmt: skip
