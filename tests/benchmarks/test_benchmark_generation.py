"""The generation benchmark: what it prints, what it counts, what it refuses to time.

No test looks at a speed.
"""

import json
from typing import Any

import pytest
import torch
from oracles.toys import toy

from benchmarks import generation
from benchmarks.generation import Case
from kvbook.cache import KVCache
from kvbook.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> Transformer:
    return toy(torch.float32)


def test_the_last_line_is_one_json_object(
    model: Transformer, capsys: pytest.CaptureFixture[str]
) -> None:
    generation.report(model, [Case(20), Case(40, every=16)], reps=1)

    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert list(result) == ["benchmark", "rows", "machine"]
    assert result["benchmark"] == "generation"
    assert [(row["tokens"], row["sampled"]) for row in result["rows"]] == [(20, False), (40, True)]
    for row in result["rows"]:
        assert list(row) == [
            "tokens", "naive_s", "cached_s", "time_ratio", "counted_ratio", "sampled"
        ]  # fmt: skip
        figures = [row["naive_s"], row["cached_s"], row["time_ratio"], row["counted_ratio"]]
        assert all(isinstance(x, float) and x > 0 for x in figures)
    assert result["machine"]["threads"] == 1
    assert len(lines) == 2 + 2 + 1  # two lines of header, a line per row, the JSON line


def test_a_sampled_row_says_so(model: Transformer, capsys: pytest.CaptureFixture[str]) -> None:
    generation.run(model, [Case(20), Case(20, every=16)], reps=1)
    full, sampled = capsys.readouterr().out.splitlines()[2:]
    assert "interpolated" not in full
    assert sampled.endswith("naive: every 16th step timed, the others interpolated")


def test_operations_are_those_of_the_two_loops(model: Transformer) -> None:
    """Per token: projections 2·2·16·6·(4+2+2+4) = 4,608 and MLP 2·2·3·16·20 = 3,840.

    Per pair of query and key: 2 layers · 2 · 2 · 4 heads · 6 = 192. Per logits: 2·16·29 = 928.
    """
    # To 4 tokens from 2, naive: 2 and 3 tokens fed, 3 and 6 pairs, logits twice.
    naive = 5 * (4608 + 3840) + 9 * 192 + 2 * 928
    # Cached: 2 tokens with 3 pairs, then 1 token that sees 3; logits twice.
    cached = 3 * (4608 + 3840) + 6 * 192 + 2 * 928
    ratio = generation.counted_ratio(model.config, Case(4, prompt=2))
    assert ratio == pytest.approx(naive / cached, rel=1e-12)


def test_unsampled_steps_are_interpolated(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps feed 2, 3, 4, 5, 6, 7 tokens; timed at 2, 6 and 7, as 10, 30 and 50 seconds."""
    given = {2: 10.0, 6: 30.0, 7: 50.0}
    monkeypatch.setattr(generation, "seconds", lambda loop, model, prompt, new: given[len(prompt)])
    total = generation.naive_seconds(model, [0] * 8, Case(8, prompt=2, every=4))
    assert total == pytest.approx(10 + 15 + 20 + 25 + 30 + 50)


def test_times_are_medians_and_the_ratio_is_taken_within_a_repetition(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios 4, 2 and 30: their median is 4. The medians' quotient would be 30 / 2."""
    naive, cached = iter([8.0, 30.0, 30.0]), iter([2.0, 15.0, 1.0])
    monkeypatch.setattr(generation, "naive_seconds", lambda *_: next(naive))
    monkeypatch.setattr(generation, "cached_seconds", lambda *_: next(cached))
    row: dict[str, Any] = generation.measure(model, Case(20), reps=3)
    assert (row["naive_s"], row["cached_s"], row["time_ratio"]) == (30.0, 2.0, 4.0)


def test_loops_that_compute_different_things_are_not_timed(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate = KVCache.truncate
    monkeypatch.setattr(KVCache, "truncate", lambda cache, n: truncate(cache, n - 1))
    with pytest.raises(ValueError, match=r"at 20 tokens the logits.*differ by"):
        generation.generate_checked(model, Case(20))
