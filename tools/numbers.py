"""Ties every number in the prose to the code or output it came from, through tests/numbers.lock.

Knows chapters, their outputs and the lock file. Does not know how numbers are written
(tools.numerals, tools.number_words) and cannot see a number that was wrong when it was first
bound: for that, read the lock's diff, which quotes the line each number was found in.

    python -m tools.numbers bind     rewrite the lock; refuse claims found nowhere in the chapter
    python -m tools.numbers check    derive the lock again and compare

A claim must occur, as printed, in a code literal or in the text that a cell prints. Comments,
strings, figures, the code of cells tagged `plot` and the output of cells tagged
`nbval-ignore-output` (timings) do not count.
Read are digits and number words of the prose, of the alt texts of figures and of comments in code.
A claim with a measured unit goes to a line that prints it with that unit if there is one.
"""

import argparse
import ast
import difflib
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from tools import notebooks, number_words, numerals, prose, reading, units
from tools.numerals import Numeral

LOCK = notebooks.ROOT / "tests" / "numbers.lock"
HEADER = (
    "# Written by `make bind`; read its diff. One line per claim:\n"
    "# chapter | Markdown cell | number <- code cell, output or source line | that line\n"
    "# Digits that are no claims follow on one line per cell.\n"
)
TIMING = "nbval-ignore-output"
LINE_SHOWN = 160


@dataclass(frozen=True)
class Place:
    """One occurrence of a number in a chapter's code or output."""

    index: int  # of the cell in the notebook
    cell: str  # its id
    kind: str  # "out" or "code"
    number: int  # of the line, from 1
    line: str
    unit: str


Evidence = dict[str, list[Place]]


def numerals_of(notebook: NotebookNode) -> list[tuple[int, str, list[Numeral]]]:
    """For each Markdown cell its index, its id and the numerals a reader sees in it."""
    cells = [(i, c) for i, c in enumerate(notebook.cells) if c.cell_type == "markdown"]
    blocks = [prose.blocks(reading.TIME.sub("", cell.source)) for _, cell in cells]
    found = numerals.of_chapter(blocks)
    return [(i, cell.id, read) for (i, cell), read in zip(cells, found, strict=True)]


def spoken_of(notebook: NotebookNode) -> list[tuple[int, str, list[Numeral]]]:
    """The same for number words, and for the digits and words of alt texts."""
    found = []
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            blocks, name, read = prose.blocks(cell.source), f"{cell.id} words", []
        else:
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            blocks, name = [prose.Block((prose.Span("text", alt),))], f"{cell.id} alt"
            read = list(numerals.of_block(blocks[0]))
        read += [word for block in blocks for word in number_words.of_block(block)]
        found.append((index, name, read))
    return found


def comments_of(notebook: NotebookNode) -> list[tuple[int, str, list[Numeral]]]:
    """The digits and number words of the comments in each code cell."""
    found = []
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            blocks = [prose.Block((prose.Span("text", text),)) for text in comments(cell.source)]
            read = [numeral for block in blocks for numeral in numerals.of_block(block)]
            read += [word for block in blocks for word in number_words.of_block(block)]
            found.append((index, f"{cell.id} comments", read))
    return found


def comments(source: str) -> list[str]:
    """The text of each comment, without its mark."""
    lines = io.StringIO(notebooks.python_of(source)).readline
    tokens = tokenize.generate_tokens(lines)
    return [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]


def evidence_of(notebook: NotebookNode) -> Evidence:
    """Every number that the chapter's code states or prints, with the places where it does."""
    places: Evidence = defaultdict(list)
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        for number, line, found, unit in units.of_lines(printed_lines(cell)):
            shown = _around(line, found.text)
            places[found.value].append(Place(index, cell.id, "out", number, shown, unit))
        if "plot" in cell.metadata.get("tags", []):
            continue  # its literals place marks on paper; what it found, it prints
        source = cell.source.splitlines()
        for value, number in literals(cell.source):
            line = _around(source[number - 1], value)
            places[value].append(Place(index, cell.id, "code", number, line, ""))
    return places


def printed_lines(cell: NotebookNode) -> list[str]:
    """The lines of a cell's text outputs that the notebook test compares; none for timings."""
    tags = cell.metadata.get("tags", [])
    if TIMING in tags:
        return []
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            texts.append(output.text)
        elif output.output_type == "error" and "raises-exception" in tags:
            texts.append(output.evalue)
        elif not any(kind.startswith("image/") for kind in output.get("data", {})):
            data = output.get("data", {})
            texts.append(data.get("text/markdown", data.get("text/plain", "")))
    return [line for text in texts for line in text.splitlines()]


def literals(source: str) -> list[tuple[str, int]]:
    """Each number literal of the code as written, in canonical spelling, with its line from 1.

    A minus sign before a literal belongs to it, and `10**-12` also counts as 1e-12.
    """
    code = notebooks.python_of(source)
    tree = ast.parse(code)
    signed = {
        id(node.operand)
        for node in ast.walk(tree)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            written = ast.get_source_segment(code, node) or ""
            if numerals.NUMERAL.fullmatch(written):
                sign = "-" if id(node) in signed else ""
                found.append((node.lineno, node.col_offset, sign + numerals.canonical(written)))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            power = re.fullmatch(r"10 \*\* \(?(-?[0-9]+)\)?", ast.unparse(node))
            if power:
                found.append((node.lineno, node.col_offset, f"1e{int(power[1])}"))
    return [(value, line) for line, _, value in sorted(found, key=lambda item: item[:2])]


def bind(
    chapter: str, cells: list[tuple[int, str, list[Numeral]]], evidence: Evidence
) -> tuple[list[str], list[str]]:
    """The lock's lines for one chapter, and a message for each claim found nowhere in it."""
    lines, missing = [], []
    for index, cell, read in cells:
        for numeral in read:
            if numeral.kind != "claim":
                continue
            places = evidence.get(numeral.value, [])
            if not places:
                missing.append(
                    f"{chapter}, cell {cell}: {numeral.text} is in no code literal and no "
                    "non-timing output of this chapter; print it or state it in code"
                )
                continue
            if numeral.unit in units.MEASURED:
                places = [place for place in places if same_unit(place, numeral)] or places
            best = min(places, key=lambda place: _cost(place, numeral, index))
            came = f"{best.cell} {best.kind} {best.number}"
            lines.append(f"{chapter} | {cell} | {numeral.text} <- {came} | {best.line}")
        rest = " ".join(_one_word(numeral) for numeral in read if numeral.kind != "claim")
        if rest:
            lines.append(f"{chapter} | {cell} | no claims: {rest}")
    return lines, missing


def bind_chapter(chapter: str, notebook: NotebookNode) -> tuple[list[str], list[str]]:
    """The same as `bind`, from the notebook itself."""
    try:
        read = numerals_of(notebook) + spoken_of(notebook) + comments_of(notebook)
        cells = sorted(read, key=lambda item: item[0])
        return bind(chapter, cells, evidence_of(notebook))
    except (SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"{chapter}: a code cell is not Python: {error}") from error


def derive(paths: list[Path]) -> tuple[str, list[str]]:
    """The text of the lock for these notebooks, and the messages for claims found nowhere."""
    lines, missing = [], []
    for path in paths:
        bound, refused = bind_chapter(path.stem, notebooks.read(path))
        lines += bound
        missing += refused
    return HEADER + "".join(f"{line}\n" for line in lines), missing


def check(paths: list[Path], lock: str) -> list[str]:
    """Everything that disagrees with the lock's text; an empty list if nothing does."""
    derived, missing = derive(paths)
    return missing + list(_difference(lock, derived))


def same_unit(place: Place, numeral: Numeral) -> bool:
    return units.canonical(place.unit) == units.canonical(numeral.unit)


def _cost(place: Place, numeral: Numeral, index: int) -> tuple[int, bool, int, int]:
    """Near is better, and printed with the same unit is worth two cells of distance each."""
    distance = abs(place.index - index)
    distance += 2 if place.kind == "code" else 0
    distance += 2 if numeral.unit and not same_unit(place, numeral) else 0
    return distance, place.index > index, place.index, place.number


def _one_word(numeral: Numeral) -> str:
    return "_".join(numeral.text.split())


def _around(line: str, shown: str) -> str:
    """The line with single spaces; of a very long one, what stands around the number."""
    line = " ".join(line.split())
    if len(line) <= LINE_SHOWN:
        return line
    start = max(0, line.find(shown.split()[0]) - LINE_SHOWN // 2)
    return "…" + line[start : start + LINE_SHOWN] + "…"


def _difference(lock: str, derived: str) -> Iterator[str]:
    found = difflib.unified_diff(
        lock.splitlines(), derived.splitlines(), "locked", "derived", lineterm="", n=0
    )
    return (line for line in found if not line.startswith(("---", "+++", "@@")))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.numbers")
    parser.add_argument("command", choices=("bind", "check"))
    options = parser.parse_args(arguments)
    try:
        paths = notebooks.chapters()
        if options.command == "check":
            if not LOCK.exists():
                raise ValueError(f"{LOCK.name} is missing: run `make bind` and read what it wrote")
            problems = check(paths, LOCK.read_text(encoding="utf-8"))
        else:
            text, problems = derive(paths)
            if not problems:
                LOCK.write_text(text, encoding="utf-8", newline="\n")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not problems:
        return 0
    checked = "If the prose is right, run `make bind` and read its diff."
    way_out = checked if options.command == "check" else "Nothing was written."
    print("\n".join([*problems, way_out]), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
