"""Rules for how a chapter reads: its first screen, its sections, its main path, what is folded.

Knows the order of a chapter. Does not know whether what it says is true.
Each rule returns what is wrong, in words that say where and what to do.
"""

import ast
import itertools
import re
from collections.abc import Iterator

from nbformat import NotebookNode

from tools import folding, notebooks, prose, reading
from tools.chapter import Chapter

# Other sections may stand between them; these come in this order.
MAIN = ("In short", "In two minutes", "Build it", "What it costs", "On a real", "Keep")
AFTER = ("Break it", "Claims", "Check your understanding", "The architect's lens")
SECTIONS = (*MAIN, *AFTER, "Today's engines", "Further reading")
SHORT = 5  # lines of "In short"
KEEPS = 3  # takeaways in all, one of them in the last section
ASSERTS = 1  # in sight, for each cell
CELL_LINES = 40
OUTPUT_WIDTH = 88  # characters that fit on a screen 1,280 pixels wide

COLORS = (
    *("dark", "darker", "white", "black", "gray", "grey", "lighter", "paler", "colored"),
    *("blue", "orange", "green", "red", "vermilion", "purple", "yellow", "pink", "sky-blue"),
)
_COLOR = re.compile(rf"\b(?:{'|'.join(COLORS)})\b", re.IGNORECASE)
_GAPS = re.compile(r"\S {2,}(?=\S)")
_KEEP = re.compile(r"^> \*\*Keep\.\*\* ", re.MULTILINE)
_BOLD_NUMBER = re.compile(r"\*\*[^*\n]*[0-9][^*\n]*\*\*")
_CLAIM_LINK = re.compile(r"\]\(#cell-id=[\w-]+\)")


def sections_in_order(chapter: Chapter) -> list[str]:
    """The sections that every chapter has, in one order, each opening a cell of its own."""
    titles = [title.lower() for _, title in _headings(chapter)]
    places = [_first(titles, section) for section in SECTIONS]
    missing = [s for s, place in zip(SECTIONS, places, strict=True) if place < 0]
    found = [f"no section that starts with {section!r}" for section in missing]
    present = [(place, s) for s, place in zip(SECTIONS, places, strict=True) if place >= 0]
    for (above, first), (below, second) in itertools.pairwise(present):
        if below < above:
            found.append(f"section {second!r} stands before {first!r}")
    for cell in chapter.markdown:
        for title in reading.headings(cell):
            if not cell.source.startswith(("# ", "## ")):
                found.append(f"cell {cell.id}: heading {title!r} does not begin its cell")
    return found


def first_screen(chapter: Chapter) -> list[str]:
    """Above the first section: the reading time, and a figure or a number in bold."""
    cells = list(_before_first_section(chapter))
    prose_there = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    drawn = any(reading.figures(cell) for cell in cells if cell.cell_type == "code")
    found = []
    if not drawn and not _BOLD_NUMBER.search(prose_there):
        found.append("above the first section stands neither a figure nor a **number in bold**")
    if reading.time_line(chapter.notebook) not in chapter.notebook.cells[0].source.splitlines():
        found.append(
            "the title cell lacks the right reading time: write the line `*About 0 minutes.*` "
            "under the title and run `python -m tools.notebooks normalize`"
        )
    return found


def in_short(chapter: Chapter) -> list[str]:
    """Five list items under "In short"."""
    source = "".join(c.source for c in chapter.markdown if _opens(c, "In short"))
    items = sum(token.type == "list_item_open" for token in prose.tokens(source))
    return [] if items == SHORT else [f"'In short' has {items} lines; it takes a list of {SHORT}"]


def takeaways(chapter: Chapter) -> list[str]:
    """Block quotes `> **Keep.** …` on the main path, the last under "Keep"."""
    cells = [c for c in reading.cells(chapter.notebook) if c.cell_type == "markdown"]
    counts = [len(_KEEP.findall(cell.source)) for cell in cells]
    found = []
    if sum(counts) < KEEPS:
        found.append(f"{sum(counts)} block quotes `> **Keep.** …`; at least {KEEPS}")
    last = [n for n, cell in zip(counts, cells, strict=True) if _opens(cell, "Keep")]
    if not any(last):
        found.append("no block quote `> **Keep.** …` in the section 'Keep'")
    return found


def setup_folded(chapter: Chapter) -> list[str]:
    """What imports kvbook, and nothing else, is set-up; it stands right below the title."""
    found = []
    for cell in _before_first_section(chapter):
        if cell.cell_type == "code" and not {"setup", "plot"} & set(_tags(cell)):
            found.append(f"cell {cell.id} stands above the first section: tag it `setup`")
    return found


def fold_tags(chapter: Chapter) -> list[str]:
    """Cells are folded by a tag that says why; `hide-…` alone leaves Colab out."""
    return [
        f"cell {cell.id} is folded without a reason: tag it {', '.join(folding.FOLDS)}"
        for cell in chapter.code
        if set(folding.HTML_TAGS) & set(_tags(cell)) and not folding.folds(cell)
    ]


def proofs_beside(chapter: Chapter) -> list[str]:
    """A cell in sight on the main path shows one idea: at most 40 lines, at most one assert."""
    found = []
    for cell in _open_code(chapter):
        lines = len(reading.code_lines(cell))
        tree = ast.parse(notebooks.python_of(cell.source))
        asserts = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
        if lines > CELL_LINES:
            found.append(f"cell {cell.id} has {lines} lines in sight; at most {CELL_LINES}")
        if asserts > ASSERTS:
            found.append(f"cell {cell.id} asserts {asserts} times in sight: move it to `evidence`")
    return found


def evidence_announced(chapter: Chapter) -> list[str]:
    """What was checked stands in sight: prose or another proof comes right before a proof."""
    found = []
    for before, cell in itertools.pairwise(chapter.notebook.cells):
        told = before.cell_type == "markdown" or {"evidence", "solution"} & set(_tags(before))
        if "evidence" in _tags(cell) and not told:
            found.append(f"cell {cell.id}: say what it checks in a Markdown cell before it")
    return found


def no_text_tables(chapter: Chapter) -> list[str]:
    """No columns aligned by spaces on the main path, and no line wider than the page."""
    found = []
    for cell in reading.cells(chapter.notebook):
        for text in _streams(cell):
            lines = text.splitlines()
            if sum(len(_GAPS.findall(line.strip())) >= 2 for line in lines) >= 2:
                found.append(f"cell {cell.id} prints a table of spaces: use plots.table")
            if any(len(line) > OUTPUT_WIDTH for line in lines):
                found.append(f"cell {cell.id} prints a line of more than {OUTPUT_WIDTH} characters")
    return found


def no_color_words(chapter: Chapter) -> list[str]:
    """Dark mode turns figures around, not prose: name curves by their labels."""
    texts = [
        (cell.id, span.text)
        for cell in chapter.markdown
        for block in prose.blocks(cell.source)
        for span in block.spans
        if span.kind == "text"
    ]
    texts += [(cell.id, alt_text(cell)) for cell in chapter.code]
    return [
        f"cell {cell} names a color or shade: {match[0]!r}"
        for cell, text in texts
        for match in _COLOR.finditer(text)
    ]


def claims_linked(chapter: Chapter) -> list[str]:
    """Each row of the claims table leads to its cell: `[…](#cell-id=…)`."""
    found = []
    for cell in chapter.markdown:
        if not _opens(cell, "Claims"):
            continue
        rows = [line for line in cell.source.splitlines() if line.startswith("|")][2:]
        found += [
            f"cell {cell.id}: no link to a cell in the row {row[:60]!r}"
            for row in rows
            if not _CLAIM_LINK.search(row)
        ]
    return found


def within_budget(chapter: Chapter) -> list[str]:
    return reading.of(chapter.notebook).faults


def figures_sealed(chapter: Chapter) -> list[str]:
    """A figure's PNG and SVG were drawn together."""
    return [
        f"cell {cell.id}: PNG and SVG are not of one run; run `make execute`"
        for cell in chapter.code
        for output in cell.outputs
        if output.get("metadata", {}).get("seal", "") != notebooks.seal(output)
    ]


def alt_text(cell: NotebookNode) -> str:
    return str(cell.metadata.get("mystnb", {}).get("image", {}).get("alt", ""))


def _tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _headings(chapter: Chapter) -> Iterator[tuple[NotebookNode, str]]:
    return ((cell, title) for cell in chapter.markdown for title in reading.headings(cell))


def _opens(cell: NotebookNode, section: str) -> bool:
    """Whether the cell holds the heading of that section."""
    return any(title.lower().startswith(section.lower()) for title in reading.headings(cell))


def _first(titles: list[str], section: str) -> int:
    starts = [i for i, title in enumerate(titles) if title.startswith(section.lower())]
    return starts[0] if starts else -1


def _before_first_section(chapter: Chapter) -> Iterator[NotebookNode]:
    return itertools.takewhile(lambda cell: not reading.headings(cell), chapter.notebook.cells)


def _open_code(chapter: Chapter) -> Iterator[NotebookNode]:
    return (cell for cell in reading.cells(chapter.notebook) if reading.code_lines(cell))


def _streams(cell: NotebookNode) -> list[str]:
    outputs = cell.get("outputs", [])
    return [output.text for output in outputs if output.output_type == "stream"]
