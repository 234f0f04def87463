"""The sweep: every decoder family of the pinned transformers, tiny, beside its own cache.

For each family two configs are read: the one that a file with every field would hold, and the one
that states the sizes alone and leaves the rest to the class. Each answer is the cache's to the
element, or a refusal; the refusals stand in a table that may only shrink.

Known differences, here as in the instrument: transformers keeps W − 1 tokens of a window between
passes, k inputs of a convolution where k − 1 are enough, and GPT-Neo's local layers whole.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvbook.accounting.geometry import CacheGeometry
from tests.oracles.tiny_models import (
    DECODERS,
    TOKENS,
    kept_compressed,
    kept_per_token,
    kept_state,
    tiny_fields,
    tiny_model,
    tokens_held,
)

TABLE: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("refused_families.json").read_text(encoding="utf-8")
)
# Refused today: whole configs, bare ones, and families that do not build tiny. Only downwards.
MOST = {"whole": 7, "bare": 9, "not built": 17}
# Families whose windows transformers masks but does not cut.
KEPT_WHOLE = ("gpt_neo",)


def ours(geometry: CacheGeometry, whole: bool = False) -> Counter[Any]:
    """Elements per token and tokens held, elements of entries, and elements of states."""
    found: Counter[Any] = Counter()
    for layer in geometry.layers:
        width = sum(kept.heads * kept.width for kept in layer.per_token)
        if layer.kind == "compressed":
            found["entries", width * layer.tokens_held(TOKENS)] += 1
            continue  # what waits for its entry is held in other shapes
        cut = layer.window is not None and not whole
        held = min(TOKENS, (layer.window or 1) - 1) if cut else TOKENS
        if width:
            found["tokens", width, held] += 1
        if layer.state and not layer.state[0].name.startswith(("open", "overlap")):
            found["state", sum(kept.heads * kept.width for kept in layer.state)] += 1
        assert layer.state is not None, "a state whose size is not known is not an answer"
    return found


def theirs(layers: list[Any]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for layer in layers:
        if width := kept_per_token(layer):
            found["tokens", width, tokens_held(layer)] += 1
        if state := kept_state(layer):
            found["state", state] += 1
        if entries := kept_compressed(layer):
            found["entries", entries] += 1
    return found


@pytest.mark.parametrize("family", [name for name in DECODERS if name not in TABLE["not built"]])
@pytest.mark.filterwarnings("ignore")
def test_a_family_is_counted_as_it_caches_or_refused(family: str, one_thread: None) -> None:
    whole, layers = tiny_model(family)
    bare = {"model_type": family, **tiny_fields(family)}
    expected = theirs(layers)
    for name, fields in (("whole", whole), ("bare", bare)):
        if family in TABLE[name]:
            with pytest.raises(ValueError, match=re.escape(TABLE[name][family])):
                CacheGeometry.from_hf(fields)
        else:
            geometry = CacheGeometry.from_hf(fields)
            assert ours(geometry, family in KEPT_WHOLE) == expected, name


@pytest.mark.parametrize("family", sorted(TABLE["not built"]))
@pytest.mark.filterwarnings("ignore")
def test_a_family_that_does_not_build_says_so(family: str) -> None:
    """When transformers mends it, it joins the others."""
    with pytest.raises(Exception, match=re.escape(TABLE["not built"][family])):
        tiny_model(family)


def test_the_table_of_refusals_only_shrinks() -> None:
    assert {name: len(rows) for name, rows in TABLE.items()} == MOST
    assert set().union(*TABLE.values()) <= set(DECODERS)
