"""The block benchmark: what it prints, and what it refuses to time. No test looks at a speed."""

import json

import pytest

from benchmarks import blocks
from benchmarks.blocks import Case, Peer, Row
from kvbook.cache.blocks import BlockPool
from kvbook.cache.prefix import PrefixCache

CASES = [Case("lend", 32, 4), Case("fill", 128, 64, 128), Case("find", 128, 64, 128)]


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    blocks.report(CASES, reps=2)

    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert list(result) == ["benchmark", "peer_hash", "rows", "machine"]
    assert result["benchmark"] == "blocks"
    assert result["peer_hash"] in ("xxh64", "blake2b")
    assert lines[0] == f"The peer hashes with {result['peer_hash']}."
    assert [
        (row.pop("case"), row.pop("per_call"), row.pop("cached")) for row in result["rows"]
    ] == [("lend", 4, 0), ("fill", 64, 128), ("find", 64, 128)]
    for row in result["rows"]:
        assert list(row) == ["kvbook_blocks_s", "peer_blocks_s", "ratio", "floor_share"]
        assert min(row.values()) > 0
    assert len(lines) == 3 + 3 + 1  # the hash and a header, a line per row, the JSON line


def test_speeds_are_medians_and_the_share_is_taken_within_a_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shares 1/4, 1/2 and 1/30: their median is 1/4. The medians' quotient would be 2/30.

    Against the peer they are 3, 1/10 and 2.
    """
    times = {
        "kvbook": iter([99.0, 8.0, 30.0, 30.0]),
        "peer": iter([99.0, 24.0, 3.0, 60.0]),
        "floor": iter([99.0, 2.0, 15.0, 1.0]),
    }

    monkeypatch.setitem(blocks.WORK, "lend", lambda case: {name: name for name in times})
    monkeypatch.setattr(blocks, "seconds", lambda work: next(times[work]))
    row: Row = blocks.measure(Case("lend", 60, 1), reps=3)
    assert (row["kvbook_blocks_s"], row["peer_blocks_s"]) == (2, 2)  # 60 / 30, 60 / 24
    assert (row["ratio"], row["floor_share"]) == (2.0, 0.25)


def test_a_cache_that_finds_something_else_is_not_timed() -> None:
    prefix = PrefixCache(BlockPool(8, 16), "other")
    with pytest.raises(ValueError, match="0 tokens were found, expected are 16"):
        blocks.serve(prefix, [list(range(17))], found=16)
    with pytest.raises(ValueError, match="the peer found 0 blocks, expected are 1"):
        blocks.serve_by_peer(Peer(8), [list(range(17))], found=16)


@pytest.mark.parametrize("name", ["kvbook", "peer", "floor"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contender_does_the_work_again_and_again(case: Case, name: str) -> None:
    """It raises if it finds anything when filling, or less than everything when finding."""
    work = blocks.WORK[case.name](case)[name]
    for _ in range(9):
        work()


# ---- The peer's algorithm, on a prompt that can be followed by hand


def test_the_peer_finds_full_blocks_but_never_the_last() -> None:
    peer = Peer(8)
    prompt = list(range(48))  # three full blocks
    assert peer.can_allocate(prompt) == 0
    table = peer.allocate(prompt, 0)
    peer.hash_blocks(prompt, table, 0)
    assert table == [0, 1, 2]
    assert [peer.can_allocate(list(range(n))) for n in (16, 17, 32, 33, 48, 49)] == [
        0, 1, 1, 2, 2, 3,
    ]  # fmt: skip
    assert peer.can_allocate([7, *range(1, 49)]) == 0
    again = peer.allocate(list(range(49)), 3)
    assert (again, peer.owners[:4]) == ([0, 1, 2, 3], [2, 2, 2, 1])
    peer.deallocate(again)
    peer.deallocate(table)
    assert list(peer.unused) == [4, 5, 6, 7, 3, 2, 1, 0]  # a chain's last block is reused first
    assert peer.can_allocate(list(range(128))) == 3
    assert peer.can_allocate(list(range(1000))) == -1


def test_the_peers_key_is_a_hash_of_the_key_before_and_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are 64-bit integers, lowest byte first."""
    monkeypatch.setattr(blocks, "hash64", lambda message: message)
    assert blocks.key_of([1, 258], None) == b"\1" + bytes(7) + b"\2\1" + bytes(6)
    assert blocks.key_of([3], 5) == b"\5" + bytes(7) + b"\3" + bytes(7)


def test_without_xxhash_the_peer_takes_64_bits_of_blake2b() -> None:
    """Of the empty message."""
    assert blocks.blake2b(b"") == int.from_bytes(bytes.fromhex("e4a6a0577479b2b4"), "little")
