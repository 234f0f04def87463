"""Derives everything that names the repository from one URL in pyproject.toml.

Knows `[project.urls] Repository`, the marked block of _config.yml and the first code cell of a
chapter. Does not know where the book is published. Without a URL there are no launch buttons, and
the first cell asks for one only where kvbook is missing.

    python -m tools.repository            rewrite what is derived
    python -m tools.repository --check    name what disagrees; exit code 1 if anything does
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools import folding, notebooks

CONFIG = notebooks.ROOT / "_config.yml"
PYPROJECT = notebooks.ROOT / "pyproject.toml"
FIRST_CELL_ID = "install-kvbook"
_URL = re.compile(r"https://[\w.-]+/[\w.-]+/[\w.-]*\w")
_BLOCK = re.compile(r"(^# repository: begin\n)(.*?)(^# repository: end$)", re.MULTILINE | re.DOTALL)


def repository_url(pyproject: Path = PYPROJECT) -> str:
    """The project's URL, or "" if it has none yet. Raises ValueError if it cannot be one."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
    url = project.get("urls", {}).get("Repository", "")
    if url and (not _URL.fullmatch(url) or url.endswith(".git")):
        raise ValueError(
            f"{pyproject.name}: Repository is {url!r}; expected https://host/owner/name, "
            "without a slash or .git at its end"
        )
    return url


def first_cell(url: str) -> str:
    """The source of every chapter's first code cell."""
    return (
        "import importlib.util\n"
        "import os\n"
        "\n"
        'if importlib.util.find_spec("kvbook") is None:  # as on Colab\n'
        f'    REPO = os.environ.get("KVBOOK_REPO", "{url}")\n'
        "    if not REPO:\n"
        '        raise ModuleNotFoundError("install kvbook, or set KVBOOK_REPO to its address")\n'
        "    %pip install -q git+{REPO}\n"
        "import kvbook"
    )


def config_block(url: str) -> str:
    """The lines between the two markers of _config.yml; "" without a URL."""
    if not url:
        return ""
    return (
        "repository:\n"
        f"  url: {url}\n"
        '  path_to_book: ""\n'
        "  branch: main\n"
        "launch_buttons:\n"
        "  notebook_interface: jupyterlab\n"
        "  colab_url: https://colab.research.google.com\n"
    )


def with_block(config: str, url: str) -> str:
    """The text of _config.yml with its block derived from the URL."""
    if not _BLOCK.search(config):
        raise ValueError(
            "_config.yml: the lines '# repository: begin' and '# repository: end' are missing; "
            "put them back, one after the other, at the left margin"
        )
    return _BLOCK.sub(lambda found: found[1] + config_block(url) + found[3], config)


def has_first_cell(notebook: NotebookNode, url: str) -> bool:
    """Whether the cell after the title is the one that installs kvbook from this URL."""
    second = [
        (cell.get("id"), cell.cell_type, folding.untitled(cell.source))
        for cell in notebook.cells[1:2]
    ]
    return second == [(FIRST_CELL_ID, "code", first_cell(url))]


def with_first_cell(notebook: NotebookNode, url: str) -> NotebookNode:
    """The notebook with its first code cell in place, right after the cell that holds the title.

    The cell is known by its id; another source under that id is replaced, and its results go.
    """
    if has_first_cell(notebook, url):
        return notebook
    kept = [cell for cell in notebook.cells if cell.get("id") != FIRST_CELL_ID]
    cell = nbformat.v4.new_code_cell(first_cell(url), id=FIRST_CELL_ID)
    cell.metadata = nbformat.from_dict({"tags": ["setup"]})
    folding.apply(cell)
    notebook.cells = [*kept[:1], cell, *kept[1:]]
    return notebook


def disagreements(config: Path, chapters: list[Path], url: str) -> list[str]:
    """The name of each file that does not say what the URL implies."""
    text = config.read_text(encoding="utf-8")
    found = [] if with_block(text, url) == text else [f"{config.name}: the repository block"]
    for path in chapters:
        if not has_first_cell(notebooks.read(path), url):
            found.append(f"{path.name}: the first code cell")
    return found


def rewrite(config: Path, chapters: list[Path], url: str) -> list[str]:
    """Rewrites what disagrees with the URL and returns the names of what was rewritten."""
    changed = disagreements(config, chapters, url)
    text = with_block(config.read_text(encoding="utf-8"), url)
    config.write_text(text, encoding="utf-8", newline="\n")
    for path in chapters:
        if any(name.startswith(f"{path.name}:") for name in changed):
            notebooks.write(with_first_cell(notebooks.read(path), url), path)
    return changed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.repository")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    try:
        url, chapters = repository_url(), notebooks.chapters()
        names = (disagreements if options.check else rewrite)(CONFIG, chapters, url)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    said = "disagrees with pyproject.toml" if options.check else "rewritten"
    for name in names:
        print(f"{name} {said}")
    return 1 if options.check and names else 0


if __name__ == "__main__":
    sys.exit(main())
