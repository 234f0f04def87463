"""The main path of a chapter, what somebody reads who comes for the mechanism, and its length.

Knows where it ends, what is left out of it, the limits and the reading rates. Does not know files.

The main path runs from the title to the end of the section "Keep". Cells tagged `setup`,
`evidence`, `solution` or `check` are not on it, nor is what they print. Code tagged `plot` or
`table` is not on it, but its figure or table is.

Rates: 150 words a minute, printed output included (technical prose is read slowly), 15 lines of
code a minute, half a minute for each figure and each displayed formula.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nbformat import NotebookNode

from tools import prose

LAST_SECTION = "keep"
ASIDE = {"setup", "evidence", "solution", "check"}
WORDS, LINES, MINUTES = 2_300, 220, 35
WORDS_A_MINUTE, LINES_A_MINUTE, MINUTES_A_FIGURE = 150, 15, 0.5
TIME = re.compile(r"^\*About [0-9]+ minutes\.\*$", re.MULTILINE)


def cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells of the main path, in order."""
    return [
        cell
        for cell in notebook.cells[: end(notebook)]
        if not ASIDE & set(cell.metadata.get("tags", []))
    ]


def end(notebook: NotebookNode) -> int:
    """The number of the first cell after the section "Keep"; all cells if there is no such."""
    kept = False
    for index, cell in enumerate(notebook.cells):
        titles = headings(cell)
        if kept and titles:
            return index
        kept = kept or any(title.lower().startswith(LAST_SECTION) for title in titles)
    return len(notebook.cells)


def headings(cell: NotebookNode) -> list[str]:
    """The headings of level 2 in a cell."""
    if cell.cell_type != "markdown":
        return []
    return [block.text for block in prose.blocks(cell.source) if block.level == 2]


def code_lines(cell: NotebookNode) -> list[str]:
    """The lines of code that a reader sees without unfolding; blank lines are none."""
    tags = cell.metadata.get("tags", [])
    if cell.cell_type != "code" or {"hide-input", "hide-cell"} & set(tags):
        return []
    return [line for line in cell.source.splitlines() if line.strip()]


def printed(cell: NotebookNode) -> list[str]:
    """The text outputs of a code cell, Markdown tables among them; no figures."""
    texts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if any(kind.startswith("image/") for kind in data):
            continue
        texts.append(output.get("text") or data.get("text/markdown") or data.get("text/plain", ""))
    return [text for text in texts if text]


def figures(cell: NotebookNode) -> int:
    """How many figures a code cell shows."""
    return sum(
        any(kind.startswith("image/") for kind in output.get("data", {}))
        for output in cell.get("outputs", [])
    )


def markdown(notebook: NotebookNode) -> str:
    """The main path as one Markdown document, figures replaced by their descriptions."""
    return "\n\n".join(part for cell in cells(notebook) for part in _parts(cell)) + "\n"


def _parts(cell: NotebookNode) -> Iterator[str]:
    if cell.cell_type == "markdown":
        yield cell.source
        return
    if code_lines(cell):
        yield f"```python\n{cell.source}\n```"
    for output in cell.outputs:
        data = output.get("data", {})
        if any(kind.startswith("image/") for kind in data):
            yield f"*Figure: {cell.metadata.get('mystnb', {}).get('image', {}).get('alt', '')}*"
        elif "text/markdown" in data:
            yield data["text/markdown"]
        elif text := output.get("text") or data.get("text/plain", ""):
            yield f"```text\n{text.rstrip()}\n```"


@dataclass(frozen=True)
class Length:
    """Words of prose, words printed, visible lines of code, figures and displayed formulas."""

    words: int
    printed: int
    lines: int
    figures: int

    @property
    def minutes(self) -> int:
        read = (self.words + self.printed) / WORDS_A_MINUTE
        return round(read + self.lines / LINES_A_MINUTE + self.figures * MINUTES_A_FIGURE)

    @property
    def faults(self) -> list[str]:
        limits = (("words", WORDS), ("lines", LINES), ("minutes", MINUTES))
        return [
            f"{getattr(self, name)} {name} on the main path, allowed are {limit}"
            for name, limit in limits
            if getattr(self, name) > limit
        ]


def of(notebook: NotebookNode) -> Length:
    """The length of the main path."""
    words = said = lines = drawn = 0
    for cell in cells(notebook):
        lines += len(code_lines(cell))
        if cell.cell_type == "markdown":
            source = TIME.sub("", cell.source)
            words += sum(_words(block) for block in prose.blocks(source))
            drawn += sum(token.type == "math_block" for token in prose.tokens(source))
        else:
            said += sum(len(text.split()) for text in printed(cell))
            drawn += figures(cell)
    return Length(words, said, lines, drawn)


def time_line(notebook: NotebookNode) -> str:
    return f"*About {of(notebook).minutes} minutes.*"


def set_time(notebook: NotebookNode) -> None:
    """Writes the time into the line of the first cell that gives it, if there is one."""
    if notebook.cells and notebook.cells[0].cell_type == "markdown":
        first = notebook.cells[0]
        first.source = TIME.sub(time_line(notebook), first.source)


def _words(block: prose.Block) -> int:
    """Words of a block; a formula within a line counts as one, a displayed one as none."""
    if all(span.kind == "math" for span in block.spans):
        return 0
    return sum(1 if span.kind == "math" else len(span.text.split()) for span in block.spans)
