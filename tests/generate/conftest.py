"""What tests of several loops look at."""

import pytest
import torch

from kvbook.model.transformer import Transformer


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the tokens of every forward pass."""
    shapes: list[tuple[int, ...]] = []
    forward = Transformer.forward

    def recording(self: Transformer, tokens: torch.Tensor, *args: object, **kw: object) -> object:
        shapes.append(tuple(tokens.shape))
        return forward(self, tokens, *args, **kw)  # type: ignore[arg-type]

    monkeypatch.setattr(Transformer, "forward", recording)
    return shapes
