"""Model folders that tests may spoil."""

import shutil
from pathlib import Path

import pytest
from oracles.reference import BY_NAME, save


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    names = [
        "llama-gqa", "llama-tied", "qwen2", "qwen3", "deepseek-v2",
        "deepseek-v2-one-query-projection", "deepseek-v3", "deepseek-v3-halves",
    ]  # fmt: skip
    return {name: save(BY_NAME[name].build(), root / name) for name in names}


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A llama model of 3 layers, C = 32, H = 4, Hkv = 2, D = 8, F = 56, V = 97, to be spoiled."""
    return Path(shutil.copytree(originals["llama-gqa"], tmp_path / "model"))
