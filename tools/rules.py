"""Every rule a chapter must keep, in one list, and the one rule about all chapters together.

Knows which rules there are. Does not know what they look at (tools.cell_rules,
tools.prose_rules). A rule takes a Chapter and returns what is wrong; nothing if it is kept.
"""

import re
from collections.abc import Callable
from pathlib import Path

from tools import cell_rules as cell
from tools import prose_rules as text
from tools.chapter import Chapter

RULES: tuple[Callable[[Chapter], list[str]], ...] = (
    *(cell.valid_format, cell.unique_ids, cell.normalized, cell.run_in_order),
    *(cell.outputs_present, cell.no_stderr, cell.errors_only_where_announced, cell.known_tags),
    *(cell.hidden_alike, cell.no_trailing_semicolon, cell.no_clear_output),
    *(cell.no_machine_paths, cell.no_addresses, cell.first_cell),
    *(cell.figures_described, cell.figures_comparable),
    *(text.no_myst, text.plain_words, text.headings, text.sections_present, text.claims_table),
    *(text.questions, text.details_render, text.links),
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
