"""Positions and their rotations: per row, with their offset, and exact in any dtype."""

import math
from itertools import pairwise

import pytest
import torch
from oracles.toys import batch, reference_logits, text, toy

from kvbook.config import ModelConfig, RopeScaling
from kvbook.errors import CacheFullError
from kvbook.model.rope import Rope, frequencies, rotate

pytestmark = pytest.mark.usefixtures("one_thread")


def rope(
    head_dim: int, positions: int, theta: float = 10_000.0, scaling: RopeScaling | None = None
) -> Rope:
    return Rope(
        ModelConfig(
            vocab_size=2, d_model=2, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=head_dim,
            d_mlp=2, max_positions=positions, rope_theta=theta, rope_scaling=scaling,
        )
    )  # fmt: skip


def at(table: Rope, x: list[float], position: int) -> list[float]:
    """One head at one position, float64."""
    angles = table.at(torch.tensor([[position]]), torch.float64)
    head = torch.tensor(x, dtype=torch.float64)[None, None, None]
    return rotate(head, *angles).flatten().tolist()


# ---- The rotation, by hand


def test_frequencies_fall_from_one() -> None:
    assert frequencies(4, 10_000.0).tolist() == pytest.approx([1.0, 0.01], abs=1e-15)
    assert frequencies(8, 10_000.0).tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], abs=1e-15)


def test_linear_scaling_divides_every_frequency() -> None:
    slowed = frequencies(4, 10_000.0, RopeScaling("linear", 4.0))
    assert slowed.tolist() == pytest.approx([0.25, 0.0025], abs=1e-15)


def test_llama3_scaling_keeps_fast_blends_middle_and_slows_slow_frequencies() -> None:
    """Over 1,000 positions the pairs turn 159, 15.9, 1.59 and 0.159 times.

    Above 4 turns nothing changes, below 1 the frequency is divided by 8; 1.5915 turns are 0.19718
    of the way from 1 to 4, so 0.01 becomes 0.01 · (0.19718 + 0.80282 / 8).
    """
    slowed = frequencies(8, 10_000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 1_000))
    assert slowed.tolist() == pytest.approx([1.0, 0.1, 0.0029753525068, 0.000125], rel=1e-9)


def test_yarn_keeps_fast_blends_middle_and_slows_slow_pairs() -> None:
    """Over 1,000 positions, 4 turns lie between pairs 1 and 2 and 1 turn between pairs 2 and 3.

    Rounded outward: from pair 1 on the blend begins, at pair 3 it ends, so pair 2 is half slowed.
    """
    slowed = frequencies(8, 10_000.0, RopeScaling("yarn", 8.0, 1.0, 4.0, 1_000))
    assert slowed.tolist() == pytest.approx([1.0, 0.1, 0.005625, 0.000125], rel=1e-12)


def test_yarn_changes_at_once_where_its_two_ends_meet() -> None:
    """Over 10,000 positions, 4,000 and 2,000 turns both lie before pair 0, so both ends are 0."""
    slowed = frequencies(8, 10_000.0, RopeScaling("yarn", 8.0, 2_000.0, 4_000.0, 10_000))
    assert slowed.tolist() == pytest.approx([1.0, 0.0125, 0.00125, 0.000125], rel=1e-12)


def test_yarn_s_blend_ends_at_the_last_element_of_a_head_at_the_latest() -> None:
    """4,000 turns lie between pairs 1 and 2; 0.001 would lie beyond pair 8, and 7 is the last.

    From 1 to 7 are six steps, so pair 2 is slowed by one sixth and pair 3 by two.
    """
    slowed = frequencies(8, 10_000.0, RopeScaling("yarn", 8.0, 0.001, 4_000.0, 1_000_000))
    assert slowed.tolist() == pytest.approx([1.0, 0.1, 0.00854166667, 0.000708333333], rel=1e-8)


def test_an_amplitude_lengthens_what_is_rotated() -> None:
    table = rope(2, 8, scaling=RopeScaling("yarn", 8.0, 1.0, 4.0, 1_000, amplitude=1.5))
    assert at(table, [1.0, 0.0], 0) == [1.5, 0.0]
    assert math.hypot(*at(table, [0.6, 0.8], 3)) == pytest.approx(1.5, abs=1e-12)


def test_longer_keys_and_queries_are_the_square_in_the_scores() -> None:
    """Both lengthened by 1.2, or every score multiplied by 1.44."""
    longer = toy(rope_scaling=RopeScaling("linear", 1.0, amplitude=1.2))(batch(1, 9))
    scaled = toy(rope_scaling=RopeScaling("linear", 1.0, score_factor=1.44))(batch(1, 9))
    assert (longer - scaled).abs().max() < 1e-12
    assert (longer - toy()(batch(1, 9))).abs().max() > 1e-2


def test_a_vector_turns_counterclockwise_by_its_position() -> None:
    """At frequency 1, (1, 0) at position 1 is (cos 1, sin 1), at position 2 (cos 2, sin 2)."""
    table = rope(2, 8)
    assert at(table, [1.0, 0.0], 0) == [1.0, 0.0]
    assert at(table, [1.0, 0.0], 1) == pytest.approx([0.5403023059, 0.8414709848], abs=1e-10)
    assert at(table, [0.0, 1.0], 1) == pytest.approx([-0.8414709848, 0.5403023059], abs=1e-10)
    assert at(table, [1.0, 0.0], 2) == pytest.approx([-0.4161468365, 0.9092974268], abs=1e-10)


def test_halves_are_paired_not_neighbors() -> None:
    """Of four numbers, 0 and 2 turn by 1 radian and 1 and 3 by 0.01."""
    table = rope(4, 8)
    turned = at(table, [1.0, 0.0, 0.0, 0.0], 1)
    assert turned == pytest.approx([0.5403023059, 0.0, 0.8414709848, 0.0], abs=1e-10)
    turned = at(table, [0.0, 1.0, 0.0, 0.0], 1)
    assert turned == pytest.approx([0.0, 0.9999500004, 0.0, 0.0099998333], abs=1e-10)


# ---- The offset


def test_scores_depend_on_the_distance_only() -> None:
    """pytorch/executorch#2010, NeuraLegion/shainet#110: angles taken from 0, or applied twice."""
    table = rope(8, 256)
    q, k = torch.randn(2, 8, dtype=torch.float64).tolist()

    def score(query: int, key: int) -> float:
        return sum(a * b for a, b in zip(at(table, q, query), at(table, k, key), strict=True))

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-12)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


@pytest.mark.parametrize("first", [1, 2, 4])
def test_six_single_steps_equal_the_full_pass(first: int) -> None:
    """pytorch/executorch#2010: the angles of a step start where the cache ends."""
    model, tokens = toy(), text(first + 6)
    expected = reference_logits(model, tokens)
    cache = model.new_cache(1, 16)
    model(torch.tensor([tokens[:first]]), cache)
    for position in range(first, first + 6):
        step = model(torch.tensor([[tokens[position]]]), cache)[0, 0]
        assert (step - expected[position]).abs().max() < 1e-9, position


def test_keys_are_stored_rotated_once_and_values_not_at_all() -> None:
    """NeuraLegion/shainet#110 turned cached keys a second time.

    With one token repeated, layer 0 has one key, turned by 0, 1, 2, … positions, and one value.
    """
    model = toy()
    cache = model.new_cache(1, 8)
    for _ in range(5):
        model(torch.tensor([[7]]), cache)
    keys, values = cache.entries(0)
    assert keys.shape == values.shape == (2, 5, 6)
    pairs = torch.complex(keys[..., :3], keys[..., 3:])
    theta = [1.0, 50.0 ** (-1 / 3), 50.0 ** (-2 / 3)]
    for before, after in pairwise(range(5)):
        turn = (pairs[:, after] / pairs[:, before]).angle()
        assert (turn - torch.tensor(theta, dtype=torch.float64)).abs().max() < 1e-12
        assert (values[:, after] - values[:, before]).abs().max() < 1e-12


def test_a_chunk_takes_the_positions_after_the_cache() -> None:
    cache = toy().new_cache(1, 16)

    def positions(T: int) -> list[list[int]]:
        new, found = torch.zeros(1, 2, T, 6, dtype=torch.float64), cache.reserve([T], T)
        for layer in (0, 1):
            cache.update(layer, new, new)
        return found.tolist()

    assert positions(4) == [[0, 1, 2, 3]]
    assert positions(3) == [[4, 5, 6]]
    assert positions(1) == [[7]]
    cache.truncate(5)
    assert positions(2) == [[5, 6]]


# ---- The bound


def test_the_last_position_works_and_the_next_is_refused() -> None:
    """karpathy/nanochat#520: the bound was checked on T, not on start + T. A table of 16."""
    model, tokens = toy(max_positions=16), text(16)
    cache = model.new_cache(1, 40)
    model(torch.tensor([tokens[:15]]), cache)
    last = model(torch.tensor([tokens[15:]]), cache)[0, 0]
    assert (last - reference_logits(model, tokens)[15]).abs().max() < 1e-9
    with pytest.raises(CacheFullError, match=r"17 tokens.*16 positions"):
        model(torch.tensor([[3]]), cache)
    assert cache.lengths == (16,)


def test_the_bound_holds_for_chunks_rows_and_no_cache() -> None:
    model = toy(max_positions=16)
    with pytest.raises(CacheFullError, match=r"17 tokens.*16 positions"):
        model(batch(1, 17))
    assert model(batch(1, 16)).shape == (1, 16, 29)
    cache = model.new_cache(2, 40)
    model(batch(2, 14), cache, counts=[3, 14])
    with pytest.raises(CacheFullError, match=r"row 1 would reach 17 tokens.*16 positions"):
        model(batch(2, 3), cache)
    assert cache.lengths == (3, 14)
    model(batch(2, 3), cache, counts=[3, 2])
    assert cache.lengths == (6, 16)


# ---- Precision


def test_bfloat16_cannot_count_but_its_angles_can() -> None:
    """EleutherAI/gpt-neox#1003 (also huggingface/transformers#29285, huggingface/candle#3520,
    sgl-project/sglang-jax#1472): positions or phases in half precision.

    In bfloat16, 257 is 256. The cosines of the two are 0.8193 and -0.0398 all the same.
    """
    line = torch.tensor([255, 256, 257, 258, 259, 260]).bfloat16()
    assert line.tolist() == [255, 256, 256, 258, 260, 260]
    assert torch.arange(4096).bfloat16().unique().numel() == 769
    cos, _ = rope(2, 512).at(torch.tensor([[256, 257]]), torch.bfloat16)
    assert cos.dtype == torch.bfloat16
    assert cos[0, :, 0, 0].tolist() == pytest.approx([-0.0398, 0.8193], abs=0.002)


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float64, 1e-11), (torch.float32, 6e-8), (torch.bfloat16, 2.0**-8)],
)
def test_angles_far_out_are_rounded_once(dtype: torch.dtype, rounding: float) -> None:
    """A float32 product of position and frequency can be off by 4e-3 at position 131,071."""
    where = [1, 4_095, 15_962, 65_537, 131_071]
    cos, sin = rope(4, 131_072, theta=7.0).at(torch.tensor([where]), dtype)
    for i, position in enumerate(where):
        for pair, frequency in enumerate([1.0, 7.0**-0.5]):
            angle = position * frequency
            assert cos[0, i, 0, pair].item() == pytest.approx(math.cos(angle), abs=rounding)
            assert sin[0, i, 0, pair + 2].item() == pytest.approx(math.sin(angle), abs=rounding)


# ---- Rows


def test_every_row_counts_its_own_positions() -> None:
    """unslothai/unsloth#3699 (PRs #3795, #3803, #4078; huggingface/transformers#18104)."""
    cache = toy().new_cache(2, 16)
    assert cache.reserve([3, 5], 5).tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    new = torch.ones(2, 2, 5, 6, dtype=torch.float64)
    for layer in (0, 1):
        cache.update(layer, new, new)
    assert cache.reserve([1, 1], 1).tolist() == [[3], [5]]
    new = torch.ones(2, 2, 1, 6, dtype=torch.float64)
    keys = cache.update(0, new, new).positions
    assert keys.tolist() == [[0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_a_padded_row_goes_on_like_its_unpadded_run(dtype: torch.dtype, tolerance: float) -> None:
    """unslothai/unsloth#3699: short rows went wrong, the longest was right."""
    model = toy(dtype)
    texts = [text(3 + 5, seed=1), text(5 + 5, seed=2), text(1 + 5, seed=3)]
    expected = [reference_logits(model, one) for one in texts]
    cache = model.new_cache(3, 16)
    tokens = torch.tensor([[0, 0, *texts[0][:3]], texts[1][:5], [0, 0, 0, 0, *texts[2][:1]]])
    logits = model(tokens, cache, counts=[3, 5, 1])[:, -1]
    for done in range(6):
        for row, start in enumerate([3, 5, 1]):
            off = (logits[row] - expected[row][start + done - 1]).abs().max()
            assert off < tolerance, (row, done)
        if done < 5:
            step = [[one[start + done]] for one, start in zip(texts, [3, 5, 1], strict=True)]
            logits = model(torch.tensor(step), cache)[:, -1]


def test_padding_without_a_cache_counts_the_same() -> None:
    model, texts = toy(), [text(3, seed=1), text(5, seed=2)]
    logits = model(torch.tensor([[0, 0, *texts[0]], texts[1]]), counts=[3, 5])
    assert (logits[0, 2:] - reference_logits(model, texts[0])).abs().max() < 1e-9
    assert (logits[1] - reference_logits(model, texts[1])).abs().max() < 1e-9


# ---- The table grows


def rows_of(table: Rope) -> list[int]:
    return [len(cos) for cos, _ in table._tables.values()]


def test_the_table_reaches_as_far_as_texts_do() -> None:
    table = rope(4, 10_000_000)
    assert rows_of(table) == []
    grown = []
    for end in (1, 4_096, 4_097, 5_000, 8_193, 10, 20_000):
        table.at(torch.tensor([[end - 1]]), torch.float32, end)
        grown += rows_of(table)
    assert grown == [4_096, 4_096, 8_192, 8_192, 16_384, 16_384, 32_768]


def test_it_never_reaches_beyond_the_model() -> None:
    table = rope(4, 5_000)
    table.at(torch.tensor([[0]]), torch.float32, 4_500)
    assert rows_of(table) == [5_000]
    small = rope(4, 10)
    small.at(torch.tensor([[0]]), torch.float32, 1)
    assert rows_of(small) == [10]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_grown_table_has_the_angles_of_the_whole_one(dtype: torch.dtype) -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 1_000)
    positions = torch.tensor([[0, 1, 2_047, 4_095, 4_096, 8_191, 8_192, 12_345]])
    whole, grown = rope(6, 20_001, 10_000.0, scaling), rope(6, 20_001, 10_000.0, scaling)
    expected = whole.at(positions, dtype)
    assert rows_of(whole) == [20_001]
    for end in (5, 4_097, 12_346):
        near = positions[:, positions[0] < end]
        for ours, all_of_them in zip(grown.at(near, dtype, end), expected, strict=True):
            assert ours.equal(all_of_them[:, : near.shape[1]])


def test_a_model_asks_for_no_more_than_its_rows_need() -> None:
    model = toy(max_positions=1_000_000)
    cache = model.new_cache(2, 5_000)
    model(batch(2, 3), cache, counts=[3, 1])
    assert rows_of(model.rope) == [4_096]
    whole = reference_logits(model, text(5, seed=0))
    assert (model(torch.tensor([text(5, seed=0)]))[0] - whole).abs().max() < 1e-9
