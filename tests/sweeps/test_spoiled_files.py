"""Files that are spoiled at random load, or are refused by name, in bounded time and memory.

A mutation that a file survives (a bit of a weight, a field that nothing reads) is no fault. A raw
error is one, and so is a long wait. ``KVBOOK_LONG_TESTS=1`` runs 10,000 mutations instead of a few
hundred.
"""

import json
import os
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracles.gguf_files import TOKENIZER, write_llama
from oracles.reference import BY_NAME, save
from oracles.toys import toy

from kvbook import load_folder, load_tokenizer
from kvbook.measure import load_record
from kvbook.measure.record import SHIPPED
from kvbook.model import weights
from sweeps import mutations
from sweeps.mutations import BYTES, HEADER, JSON, Mutation

MUTATIONS = 10_000 if os.environ.get("KVBOOK_LONG_TESTS") else 400
INDEX = "model.safetensors.index.json"
MOST_SECONDS = 5.0  # for one file; a whole one takes some 10 ms
MOST_KIB = 1024**2  # by which all of them together may let the process grow

Load = Callable[[Path], object]


def load_gguf(folder: Path) -> object:
    return weights._load_gguf(folder / "m.gguf", torch.float32, "cpu")


def load_and_run(folder: Path) -> object:
    """What loads must also compute."""
    return load_folder(folder)(torch.tensor([[1, 2]])).shape


# What is spoiled, how, what reads it, and the share of the mutations that it gets.
CASES: dict[str, tuple[str, str, list[Mutation], Load, float]] = {
    "GGUF weights": ("gguf", "m.gguf", BYTES, load_gguf, 0.2),
    "GGUF tokenizer": ("gguf", "m.gguf", BYTES, lambda at: load_tokenizer(at / "m.gguf"), 0.1),
    "safetensors bytes": ("folder", "model.safetensors", BYTES, load_folder, 0.1),
    "safetensors header": ("folder", "model.safetensors", HEADER, load_folder, 0.15),
    "index of shards": ("shards", INDEX, [*JSON, *BYTES], load_folder, 0.1),
    "config.json": ("folder", "config.json", [*JSON, *BYTES], load_and_run, 0.15),
    "tokenizer.json": ("folder", "tokenizer.json", [*JSON, *BYTES], load_tokenizer, 0.1),
    "generation_config.json": ("folder", "generation_config.json", JSON, load_tokenizer, 0.05),
    "record": ("record", "r.json", [*JSON, *BYTES], lambda at: load_record(at / "r.json"), 0.05),
}  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    for name in ("gguf", "record"):
        (root / name).mkdir()
    write_llama(root / "gguf" / "m.gguf", toy(head_dim=4), extra=TOKENIZER)
    save(BY_NAME["llama-gqa"].build(), root / "folder")
    save(BY_NAME["llama-gqa"].build(), root / "shards", max_shard_size="40KB")
    load_tokenizer(root / "gguf" / "m.gguf")._backend.save(str(root / "folder" / "tokenizer.json"))
    (root / "folder" / "generation_config.json").write_text('{"eos_token_id": [0, 2], "x": {}}')
    shutil.copy(next(SHIPPED.glob("*.json")), root / "record" / "r.json")
    return root


@pytest.mark.parametrize("case", CASES)
def test_the_files_load_before_they_are_spoiled(case: str, originals: Path) -> None:
    folder, _, _, load, _ = CASES[case]
    assert load(originals / folder) is not None


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", CASES)
def test_a_spoiled_file_loads_or_is_refused_by_name(
    case: str, originals: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder, name, kinds, load, share = CASES[case]
    here = Path(shutil.copytree(originals / folder, tmp_path / folder))
    content = (here / name).read_bytes()
    draw = random.Random(case)
    outcomes: Counter[str] = Counter()
    faults = []
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(round(MUTATIONS * share)):
        spoiled, what = draw.choice(kinds)(draw, content)
        (here / name).write_bytes(spoiled)
        started = time.perf_counter()
        try:
            load(here)
            outcomes["loaded"] += 1
        except ValueError as error:
            outcomes[type(error).__name__] += 1
            if not str(error):
                faults.append(f"{what}: an error without words")
        except BaseException as error:
            faults.append(f"{what}: {type(error).__name__}: {error!s:.150}")
        if time.perf_counter() - started > MOST_SECONDS:
            faults.append(f"{what}: {time.perf_counter() - started:.1f} s")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    record_property("outcomes", dict(outcomes))
    assert not faults, "\n".join(faults[:20])
    assert grown < MOST_KIB
    assert sum(outcomes[kind] for kind in outcomes if kind != "loaded"), "nothing was refused"


# ---- Spoiled on purpose: what a random mutation may not hit


def test_json_can_be_nested_repeated_and_cut(tmp_path: Path) -> None:
    """The mutations do what their names say."""
    draw = random.Random(0)
    content = json.dumps({"a": [1, 2], "b": {"c": "x"}}).encode()
    deep, _ = mutations.nested(draw, content)
    assert max(deep.count(b"["), deep.count(b'{"a":')) >= mutations.DEEP
    repeated, _ = mutations.key_repeated(draw, content)
    assert repeated.count(b'"a":') + repeated.count(b'"b":') == 3
    cut, what = mutations.truncated(draw, content)
    assert what == f"cut to {len(cut)} bytes"
    assert content.startswith(cut)
