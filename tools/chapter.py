"""A chapter as the rules see it.

Knows the notebook and the file it was read from. Does not know a single rule.
"""

from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from tools import notebooks


@dataclass(frozen=True)
class Chapter:
    """A notebook, its file and that file's text; `url` is the repository's, "" if it has none."""

    path: Path
    text: str
    notebook: NotebookNode
    url: str = ""

    @property
    def code(self) -> list[NotebookNode]:
        return [cell for cell in self.notebook.cells if cell.cell_type == "code"]

    @property
    def markdown(self) -> list[NotebookNode]:
        return [cell for cell in self.notebook.cells if cell.cell_type == "markdown"]


def load(path: Path, url: str) -> Chapter:
    return Chapter(path, path.read_text(encoding="utf-8"), notebooks.read(path), url)
