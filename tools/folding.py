"""Folds cells alike in the HTML book, in JupyterLab and on Colab, from one tag per cell.

Knows the tags, their labels, and what each viewer wants to see in a cell's metadata. Does not know
what belongs into which cell (tools.form_rules).

A writer sets the tag; `apply` derives the rest from it, and removes it when the tag is gone:

- HTML:        a tag `hide-input`, `hide-output` or `hide-cell`, and the label as the prompt
- JupyterLab:  `jupyter.source_hidden`, `jupyter.outputs_hidden`
- Colab:       `cellView: form` and a first line `# @title LABEL`; `collapsed` for the output
"""

import re
from dataclasses import dataclass

import nbformat
from nbformat import NotebookNode


@dataclass(frozen=True)
class Fold:
    """What a tag folds. `output` is "keep", "fold", or "long": folded above one printed line."""

    label: str
    code: bool
    output: str


FOLDS = {  # where a cell has two of them, the first one here names it
    "answer": Fold("I have predicted: show", code=False, output="fold"),
    "setup": Fold("Setup", code=True, output="fold"),
    "evidence": Fold("Evidence", code=True, output="long"),
    "solution": Fold("One solution", code=True, output="fold"),
    "check": Fold("The check", code=True, output="keep"),
    "plot": Fold("Plotting code", code=True, output="keep"),
    "table": Fold("Code of this table", code=True, output="keep"),
}
HTML_TAGS = ("hide-input", "hide-output", "hide-cell")
_TITLE = re.compile(r"\A# @title [^\n]*\n?")


def folds(cell: NotebookNode) -> list[Fold]:
    """What the cell's tags fold, in the order of FOLDS."""
    tags = cell.metadata.get("tags", [])
    return [fold for tag, fold in FOLDS.items() if tag in tags]


def code_folded(cell: NotebookNode) -> bool:
    return any(fold.code for fold in folds(cell))


def output_folded(cell: NotebookNode) -> bool:
    """Whether the outputs that the cell has now are folded."""
    kinds = {fold.output for fold in folds(cell)}
    return bool(cell.get("outputs")) and ("fold" in kinds or ("long" in kinds and _is_long(cell)))


def html_tag(code: bool, output: bool) -> list[str]:
    if code and output:
        return ["hide-cell"]
    return ["hide-input"] * code + ["hide-output"] * output


def apply(cell: NotebookNode) -> None:
    """Derives, in place, everything that the three viewers want from the cell's tags.

    A cell without one of the tags keeps its own `hide-…` tags and `jupyter` metadata.
    """
    found = folds(cell)
    for key in ("cellView", "collapsed"):
        cell.metadata.pop(key, None)
    if cell.cell_type != "code":
        return
    cell.source = untitled(cell.source)
    if not found:
        _set_prompt(cell, "")
        return
    label, code, output = found[0].label, code_folded(cell), output_folded(cell)
    kept = [tag for tag in cell.metadata.tags if tag not in HTML_TAGS]
    cell.metadata["tags"] = kept + html_tag(code, output)
    hidden = {"source_hidden": code, "outputs_hidden": output}
    cell.metadata["jupyter"] = nbformat.from_dict({k: True for k, v in hidden.items() if v})
    _set_prompt(cell, label)
    if code:
        cell.metadata["cellView"] = "form"
        cell.source = f"# @title {label}\n{cell.source}"
    if output:
        cell.metadata["collapsed"] = True


def untitled(source: str) -> str:
    """The source without the first line that names a fold on Colab."""
    return _TITLE.sub("", source)


def _set_prompt(cell: NotebookNode, label: str) -> None:
    """The label of the fold in the HTML; "" takes it away."""
    kept = dict(cell.metadata.get("mystnb", {}))
    for key in ("code_prompt_show", "code_prompt_hide"):
        kept.pop(key, None)
        if label:
            kept[key] = label
    cell.metadata["mystnb"] = nbformat.from_dict(kept)


def _is_long(cell: NotebookNode) -> bool:
    """More than one printed line, or anything that is no plain text."""
    if any(output.output_type != "stream" for output in cell.outputs):
        return True
    return sum(len(output.text.splitlines()) for output in cell.outputs) > 1
