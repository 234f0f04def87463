"""Rules for a chapter's file, its code cells and their outputs.

Knows the form of a cell. Does not know whether an output is fresh (tools.notebooks test).
Each rule returns what is wrong, in words that say where and what to do.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools import folding, notebooks, repository
from tools.chapter import Chapter

TAGS = {*folding.FOLDS, *folding.HTML_TAGS, "nbval-ignore-output", "raises-exception"}
ALT_LENGTH = 40

_MACHINE_PATH = re.compile(
    r"(?<![\w./:-])/(?:home|root|Users|tmp|var|opt|mnt|usr|private|content)/"
    r"|[A-Za-z]:\\\\?Users|site-packages|dist-packages|ipykernel_[0-9]"
)
# What an object says of itself: where it lies, or, a module of PyTorch, what it is built of
# (its parts on lines of their own, or its sizes).
_ADDRESS = re.compile(r"0x[0-9a-f]{8,}")
_MODULE = re.compile(r"\w+\(\n\s+\([\w-]+\): |\w+\(in_features=|Embedding\(\d|Norm\(\(")
_NBVAL_COMMENT = re.compile(r"^\s*#+\s*(?:NBVAL|PYTEST_VALIDATE)_\w+", re.MULTILINE)


def valid_format(chapter: Chapter) -> list[str]:
    try:
        nbformat.validate(chapter.notebook)
    except nbformat.ValidationError as error:
        return [f"not a valid notebook: {error.message}"]
    return []


def unique_ids(chapter: Chapter) -> list[str]:
    ids = [cell.get("id") for cell in chapter.notebook.cells]
    return [f"cell id {i!r} occurs more than once" for i in {*ids} if ids.count(i) > 1]


def normalized(chapter: Chapter) -> list[str]:
    if chapter.text == notebooks.dumps(notebooks.normalize(chapter.notebook)):
        return []
    return ["the file is not in normal form: run `make execute`"]


def run_in_order(chapter: Chapter) -> list[str]:
    counts = [cell.execution_count for cell in chapter.code]
    if counts == list(range(1, len(counts) + 1)):
        return []
    return [f"execution counts are {counts}, not 1 to {len(counts)}: run `make execute`"]


def outputs_present(chapter: Chapter) -> list[str]:
    """A cell that prints, or ends in a value, has something to show for it.

    A last call may return None; if it does not, the notebook test misses its output.
    """
    return [
        f"cell {cell.id} prints or ends in a value but has no output"
        for cell in chapter.code
        if _shows(cell.source) and not cell.outputs
    ]


def no_stderr(chapter: Chapter) -> list[str]:
    return [
        f"cell {cell.id} wrote to stderr: {output.text[:60]!r}"
        for cell, output in _outputs(chapter)
        if output.output_type == "stream" and output.name == "stderr"
    ]


def errors_only_where_announced(chapter: Chapter) -> list[str]:
    found = []
    for cell in chapter.code:
        failed = any(output.output_type == "error" for output in cell.outputs)
        announced = "raises-exception" in _tags(cell)
        if failed != announced:
            does = "raises without" if failed else "does not raise despite"
            found.append(f"cell {cell.id} {does} the tag raises-exception")
    return found


def known_tags(chapter: Chapter) -> list[str]:
    """A misspelled tag, or one that skips a cell, would turn a check off in silence."""
    found = [
        f"cell {cell.id} has the tag {tag!r}; allowed: {', '.join(sorted(TAGS))}"
        for cell in chapter.notebook.cells
        for tag in _tags(cell)
        if tag not in TAGS
    ]
    found += [
        f"cell {cell.id} steers nbval by a comment; use a tag"
        for cell in chapter.code
        if _NBVAL_COMMENT.search(cell.source)
    ]
    return found


def hidden_alike(chapter: Chapter) -> list[str]:
    """What one viewer folds, all three fold."""
    found = []
    for cell in chapter.code:
        jupyter, tags = cell.metadata.get("jupyter", {}), set(_tags(cell))
        code, output = (
            bool(tags & {"hide-input", "hide-cell"}),
            bool(tags & {"hide-output", "hide-cell"}),
        )
        if jupyter.get("source_hidden", False) != code:
            found.append(f"cell {cell.id}: HTML and JupyterLab do not fold the same code")
        if jupyter.get("outputs_hidden", False) != output:
            found.append(f"cell {cell.id}: HTML and JupyterLab do not fold the same output")
        if not tags & set(folding.FOLDS):
            continue
        titled = cell.source.startswith("# @title ")
        if not (cell.metadata.get("cellView") == "form") == titled == code:
            found.append(f"cell {cell.id}: HTML and Colab do not fold the same code")
        if cell.metadata.get("collapsed", False) != output:
            found.append(f"cell {cell.id}: HTML and Colab do not fold the same output")
    return found


def no_trailing_semicolon(chapter: Chapter) -> list[str]:
    return [
        f"cell {cell.id} ends in `;`: end a figure with plt.show()"
        for cell in chapter.code
        if cell.source.rstrip().endswith(";")
    ]


def no_clear_output(chapter: Chapter) -> list[str]:
    return [
        f"cell {cell.id} uses clear_output, which cannot be compared"
        for cell in chapter.code
        if "clear_output" in cell.source
    ]


def no_machine_paths(chapter: Chapter) -> list[str]:
    found = []
    here = {str(notebooks.ROOT), str(Path.home())} - {"/"}
    for cell in chapter.notebook.cells:
        for text in [cell.source, *(_text(output) for output in cell.get("outputs", []))]:
            match = _MACHINE_PATH.search(text)
            if match or any(path in text for path in here):
                shown = match[0] if match else "the path of this checkout"
                found.append(f"cell {cell.id} holds a path of one machine: {shown}")
    return found


def no_addresses(chapter: Chapter) -> list[str]:
    """No output is an object left behind by a last line that nobody meant to print."""
    return [
        f"cell {cell.id} prints {what}: {match[0]!r}; end the cell in print() or a statement"
        for cell, output in _outputs(chapter)
        for what, pattern in (("a memory address", _ADDRESS), ("a bare module", _MODULE))
        if (match := pattern.search(_text(output)))
    ]


def first_cell(chapter: Chapter) -> list[str]:
    if repository.has_first_cell(chapter.notebook, chapter.url):
        return []
    return ["the second cell is not the one that installs kvbook: run `make repository`"]


def figures_described(chapter: Chapter) -> list[str]:
    found = []
    for cell in chapter.code:
        if not any(_image_kinds(output) for output in cell.outputs):
            continue
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        if len(alt) < ALT_LENGTH or re.fullmatch(r"\S*\.(?:png|svg|jpe?g)", alt):
            found.append(
                f"cell {cell.id}: metadata mystnb.image.alt is {alt!r}; describe the figure in at "
                f"least {ALT_LENGTH} characters"
            )
    return found


def figures_comparable(chapter: Chapter) -> list[str]:
    """SVG is compared, PNG is what every viewer shows; a date would differ in each run."""
    found = []
    for cell, output in _outputs(chapter):
        kinds = _image_kinds(output)
        if kinds and not {"image/svg+xml", "image/png"} <= kinds:
            found.append(f"cell {cell.id} has {sorted(kinds)}; a figure needs SVG and PNG")
        if "<dc:date>" in output.get("data", {}).get("image/svg+xml", ""):
            found.append(f"cell {cell.id}: the SVG holds a date; save it with metadata Date=None")
    return found


def _tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _outputs(chapter: Chapter) -> Iterator[tuple[NotebookNode, NotebookNode]]:
    return ((cell, output) for cell in chapter.code for output in cell.outputs)


def _text(output: NotebookNode) -> str:
    """What an output says in words; pictures are left out."""
    data = [v for k, v in output.get("data", {}).items() if not k.startswith("image/")]
    parts = [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", []), *data]
    return "\n".join(str(part) for part in parts)


def _image_kinds(output: NotebookNode) -> set[str]:
    return {kind for kind in output.get("data", {}) if kind.startswith("image/")}


def _shows(source: str) -> bool:
    body = ast.parse(notebooks.python_of(source)).body
    if any(_prints(node) for node in body):
        return True
    last = body[-1] if body else None
    return isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call)


def _prints(node: ast.AST) -> bool:
    """Whether a statement calls print, show or display when the cell runs, whatever the data."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda | ast.If | ast.ExceptHandler):
        return False
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in ("print", "show", "display"):
            return True
    return any(_prints(child) for child in ast.iter_child_nodes(node))
