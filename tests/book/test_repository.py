"""The repository URL stands in pyproject.toml; everything else that names it is derived."""

from pathlib import Path

import pytest
from oracles.sample_chapter import sample

from tools import notebooks, repository

URL = "https://example.org/someone/kvbook"
CHAPTERS = sorted(notebooks.BOOK.glob("*.ipynb"))

CELL_WITH_URL = """\
import importlib.util
import os

if importlib.util.find_spec("kvbook") is None:  # as on Colab
    REPO = os.environ.get("KVBOOK_REPO", "https://example.org/someone/kvbook")
    if not REPO:
        raise ModuleNotFoundError("install kvbook, or set KVBOOK_REPO to its address")
    %pip install -q git+{REPO}
import kvbook"""

EMPTY_CONFIG = "title: A\n# repository: begin\n# repository: end\nlogo: b\n"
FULL_CONFIG = """\
title: A
# repository: begin
repository:
  url: https://example.org/someone/kvbook
  path_to_book: ""
  branch: main
launch_buttons:
  notebook_interface: jupyterlab
  colab_url: https://colab.research.google.com
# repository: end
logo: b
"""


def write_pyproject(folder: Path, urls: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(f'[project]\nname = "x"\n{urls}')
    return path


def test_the_first_cell_holds_the_url_once() -> None:
    assert repository.first_cell(URL) == CELL_WITH_URL
    assert repository.first_cell("") == CELL_WITH_URL.replace(URL, "")


def test_the_first_cell_asks_for_a_url_where_kvbook_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVBOOK_REPO", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code = notebooks.python_of(repository.first_cell(""))
    with pytest.raises(ModuleNotFoundError, match="set KVBOOK_REPO"):
        exec(code, {})


def test_the_block_is_empty_without_a_url_and_complete_with_one() -> None:
    assert repository.with_block(EMPTY_CONFIG, URL) == FULL_CONFIG
    assert repository.with_block(FULL_CONFIG, "") == EMPTY_CONFIG
    assert repository.with_block(FULL_CONFIG, URL) == FULL_CONFIG


def test_a_config_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="repository: begin"):
        repository.with_block("title: A\n", URL)


def test_the_url_is_read_and_may_be_absent(tmp_path: Path) -> None:
    assert repository.repository_url(write_pyproject(tmp_path, "")) == ""
    urls = f'[project.urls]\nRepository = "{URL}"\n'
    assert repository.repository_url(write_pyproject(tmp_path, urls)) == URL


@pytest.mark.parametrize(
    "url", ["http://example.org/a/b", f"{URL}/", f"{URL}.git", "example.org/a/b", f'{URL}\\" + x']
)
def test_what_cannot_be_a_repository_is_refused(tmp_path: Path, url: str) -> None:
    path = write_pyproject(tmp_path, f'[project.urls]\nRepository = "{url}"\n')
    with pytest.raises(ValueError, match="expected https://host/owner/name"):
        repository.repository_url(path)


def test_rewriting_follows_the_url_and_is_idempotent(tmp_path: Path) -> None:
    config, chapter = tmp_path / "_config.yml", tmp_path / "01-sample.ipynb"
    config.write_text(EMPTY_CONFIG)
    notebooks.write(sample(), chapter)
    assert repository.disagreements(config, [chapter], "") == []

    both = ["_config.yml: the repository block", "01-sample.ipynb: the first code cell"]
    assert repository.disagreements(config, [chapter], URL) == both
    assert repository.rewrite(config, [chapter], URL) == both
    assert config.read_text() == FULL_CONFIG
    cells = notebooks.read(chapter).cells
    assert [cell.id for cell in cells[:3]] == ["title", "install-kvbook", "short"]
    assert cells[1].source == "# @title Setup\n" + CELL_WITH_URL

    before = chapter.read_bytes()
    assert repository.rewrite(config, [chapter], URL) == []
    assert chapter.read_bytes() == before
    assert repository.rewrite(config, [chapter], "") == both
    assert config.read_text() == EMPTY_CONFIG


def test_a_missing_first_cell_is_put_after_the_title() -> None:
    notebook = sample()
    del notebook.cells[1]
    cells = repository.with_first_cell(notebook, URL).cells
    assert [cell.id for cell in cells[:3]] == ["title", "install-kvbook", "short"]
    assert len(cells) == len(sample().cells)


def test_a_first_cell_in_place_keeps_its_results() -> None:
    assert repository.with_first_cell(sample(), "") == sample()
    assert repository.with_first_cell(sample(), URL).cells[1].execution_count is None


def test_the_book_agrees_with_the_url() -> None:
    assert CHAPTERS, "no chapters in book/"
    url = repository.repository_url()
    assert repository.disagreements(repository.CONFIG, CHAPTERS, url) == []
