"""The block benchmark: what it prints, and what it refuses to time. No test looks at a speed."""

import json

import pytest

from benchmarks import blocks
from benchmarks.blocks import Case, Row
from kvbook.cache.blocks import BlockPool
from kvbook.cache.prefix import PrefixCache

CASES = [Case("lend", 32, 4, aim=7000), Case("fill", 128, 64, 128), Case("find", 128, 64, 128)]


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    blocks.report(CASES, reps=2)

    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert list(result) == ["benchmark", "rows", "machine"]
    assert result["benchmark"] == "blocks"
    assert [
        (row.pop("case"), row.pop("per_call"), row.pop("cached"), row.pop("aim_blocks_s"))
        for row in result["rows"]
    ] == [("lend", 4, 0, 7000), ("fill", 64, 128, None), ("find", 64, 128, None)]
    for row in result["rows"]:
        assert list(row) == ["kvbook_blocks_s", "floor_share"]
        assert row["kvbook_blocks_s"] > 0
    assert len(lines) == 2 + 3 + 1  # two lines of header, a line per row, the JSON line
    assert "        7  " in lines[2]  # the aim, in thousands
    assert "        -  " in lines[3]


def test_speeds_are_medians_and_the_share_is_taken_within_a_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shares 1/4, 1/2 and 1/30: their median is 1/4. The medians' quotient would be 2/30."""
    times = {"kvbook": iter([99.0, 8.0, 30.0, 30.0]), "floor": iter([99.0, 2.0, 15.0, 1.0])}

    monkeypatch.setitem(blocks.WORK, "lend", lambda case: ("kvbook", "floor"))
    monkeypatch.setattr(blocks, "seconds", lambda work: next(times[work]))
    row: Row = blocks.measure(Case("lend", 60, 1), reps=3)
    assert (row["kvbook_blocks_s"], row["floor_share"]) == (2, 0.25)


def test_a_cache_that_finds_something_else_is_not_timed() -> None:
    prefix = PrefixCache(BlockPool(8, 16), "other")
    with pytest.raises(ValueError, match="0 tokens were found, expected are 16"):
        blocks.serve(prefix, [list(range(17))], found=16)


def test_filling_never_finds_and_evicts_for_every_block() -> None:
    kvbook, _ = blocks.fill(CASES[1])
    for _ in range(3):
        kvbook()  # raises if one token is found
