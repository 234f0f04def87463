"""Looking inside a forward pass: pieces, layers, entries."""

import pytest
import torch
from oracles.toys import LATENT, reference_logits, text, toy

from kvbook.model.trace import cached_entries, hidden_states, logits_in_pieces

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("cuts", [[], [1], [4], [1, 2, 5], range(1, 7)])
def test_a_text_in_pieces_has_the_logits_of_the_whole(cuts: list[int]) -> None:
    logits = logits_in_pieces(toy(), torch.tensor(text(7)), cuts)
    torch.testing.assert_close(logits, reference_logits(toy(), text(7)), rtol=0, atol=1e-9)


def test_pieces_continue_what_a_cache_holds() -> None:
    cache, whole = toy().new_cache(1, 9), text(9)
    toy()(torch.tensor([whole[:4]]), cache)
    logits = logits_in_pieces(toy(), torch.tensor(whole[4:]), [2], cache)
    torch.testing.assert_close(logits, reference_logits(toy(), whole)[4:], rtol=0, atol=1e-9)
    assert cache.lengths == (9,)


def test_the_pieces_are_those_between_the_cuts() -> None:
    """Each piece is one pass of the model."""
    seen: list[int] = []
    handle = toy().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    logits_in_pieces(toy(), torch.tensor(text(7)), [1, 3])
    handle.remove()
    assert seen == [1, 2, 4]


@pytest.mark.parametrize("cuts", [[0], [7], [3, 3]])
def test_a_piece_without_tokens_is_refused(cuts: list[int]) -> None:
    with pytest.raises(ValueError, match="cuts must ascend"):
        logits_in_pieces(toy(), torch.tensor(text(7)), cuts)


def test_entries_of_two_widths_do_not_go_into_one_tensor() -> None:
    with pytest.raises(ValueError, match=r"ask cache\.entries"):
        cached_entries(toy(**LATENT), torch.tensor(text(3)))


def test_a_look_inside_leaves_nothing_behind() -> None:
    """Nor does one that fails: a hook that stayed would keep every later pass's states."""
    model = toy()
    hidden_states(model, torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match="token"):
        hidden_states(model, torch.tensor([[1, 2]]), model.new_cache(1, 1))
    for block in model.blocks:
        assert not block._forward_hooks
        assert not block._forward_pre_hooks
