"""Every rule a chapter must keep, in one list, and the one rule about all chapters together.

Knows which rules there are. Does not know what they look at (tools.cell_rules,
tools.prose_rules, tools.form_rules). A rule takes a Chapter and returns what is wrong; nothing if
it is kept.

    python -m tools.rules CHAPTER     print what a chapter breaks; exit code 1 if anything
"""

import argparse
import io
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from tools import cell_rules as cell
from tools import exercises, notebooks, number_rules, repository
from tools import form_rules as form
from tools import prose_rules as text
from tools.chapter import Chapter, load

RULES: tuple[Callable[[Chapter], list[str]], ...] = (
    *(cell.valid_format, cell.unique_ids, cell.normalized, cell.run_in_order),
    *(cell.outputs_present, cell.no_stderr, cell.errors_only_where_announced, cell.known_tags),
    *(cell.hidden_alike, cell.no_trailing_semicolon, cell.no_clear_output),
    *(cell.no_machine_paths, cell.no_addresses, cell.first_cell),
    *(cell.figures_described, cell.figures_comparable),
    *(text.no_myst, text.plain_words, text.headings, text.sections_present, text.claims_table),
    *(text.questions, text.details_render, text.links),
)

# What makes a chapter teach first and prove beside it.
FORM: tuple[Callable[[Chapter], list[str]], ...] = (
    *(form.sections_in_order, form.first_screen, form.in_short, form.takeaways),
    *(form.setup_folded, form.fold_tags, form.proofs_beside, form.evidence_announced),
    *(form.no_text_tables, form.no_color_words, form.claims_linked, form.within_budget),
    *(form.figures_sealed, exercises.exercises_formed),
    *(number_rules.units_agree, number_rules.no_spelled_fractions),
)


def table_of_contents(chapters: list[Path], toc: str) -> list[str]:
    """The table of contents lists every notebook of the folder, in the order of the names.

    chapters: the notebooks in the folder; toc: the text of _toc.yml, paths without extension
    """
    folder = chapters[0].parent
    files = re.findall(r"^\s*(?:-\s*)?file:\s*(\S+)\s*$", toc, re.MULTILINE)
    pages = {f"{folder.name}/{page.stem}" for page in folder.glob("*.md")}
    listed = [file for file in files if file not in pages]
    present = [f"{folder.name}/{path.stem}" for path in chapters]
    return [] if listed == present else [f"_toc.yml lists {listed}, the folder holds {present}"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.rules")
    parser.add_argument("chapter", help="a number such as 01, or a file")
    options = parser.parse_args(arguments)
    try:
        chapter = load(notebooks.find(options.chapter), repository.repository_url())
        faults = [f"{rule.__name__}: {said}" for rule in (*RULES, *FORM) for said in rule(chapter)]
        with redirect_stdout(io.StringIO()):
            faults += [f"exercise {e.name}: {said}" for e, said in exercises.judged(chapter)]
    except ValueError as error:
        faults = [str(error)]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
