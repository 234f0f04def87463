"""Rules for a chapter's Markdown: its sections, words, links and what every viewer can show.

Knows the form of a chapter. Does not know whether its numbers are right (tools.numbers).
Each rule returns what is wrong, in words that say where and what to do.
"""

import itertools
import re
from collections.abc import Iterator

from nbformat import NotebookNode

from tools import prose
from tools.chapter import Chapter

BANNED_WORDS = ("simply", "just", "obviously")
SECTIONS = ("Break it", "Claims", "Check your understanding", "Further reading")
QUESTIONS = 5
CODE_QUESTIONS = 2
CELL_LINK = "#cell-id="

_ROLE = re.compile(r"\{[A-Za-z][\w:.+-]*\}$")
_LABEL = re.compile(r"^\([\w:-]+\)=\s*$", re.MULTILINE)


def no_myst(chapter: Chapter) -> list[str]:
    """Directives, roles, labels and colon fences show raw outside of the HTML book."""
    found = []
    for cell in chapter.markdown:
        tokens = list(prose.tokens(cell.source))
        for token, following in zip(tokens, [*tokens[1:], None], strict=True):
            role = following is not None and following.type == "code_inline"
            if token.type == "fence" and token.info.lstrip().startswith("{"):
                found.append(f"cell {cell.id}: directive {token.info}")
            elif token.type == "text" and role and _ROLE.search(token.content):
                found.append(f"cell {cell.id}: role {token.content[-30:]}")
            elif token.type == "text" and token.content.startswith(":::"):
                found.append(f"cell {cell.id}: colon fence {token.content[:30]}")
            elif token.type == "math_block_label":
                found.append(f"cell {cell.id}: equation label ({token.info})")
        if label := _LABEL.search(cell.source):
            found.append(f"cell {cell.id}: label {label[0]}")
    return found


def plain_words(chapter: Chapter) -> list[str]:
    """Words that tell a reader that something is easy."""
    return [
        f"cell {cell.id} says {word!r}"
        for cell in chapter.markdown
        for word in BANNED_WORDS
        for block in prose.blocks(cell.source)
        for span in block.spans
        if span.kind == "text" and re.search(rf"\b{word}\b", span.text, re.IGNORECASE)
    ]


def headings(chapter: Chapter) -> list[str]:
    """One title, in the first cell; no level skipped on the way down."""
    found = []
    levels = [(cell.id, b.level, b.text) for cell, b in _blocks(chapter) if b.level]
    if not levels or levels[0][:2] != (chapter.notebook.cells[0].id, 1):
        found.append("the first cell does not open with the title, a heading of level 1")
    if sum(level == 1 for _, level, _ in levels) > 1:
        found.append("more than one heading of level 1")
    for (_, above, _), (cell, level, text) in itertools.pairwise(levels):
        if level > above + 1:
            found.append(f"cell {cell}: heading {text!r} skips from level {above} to {level}")
    return found


def sections_present(chapter: Chapter) -> list[str]:
    titles = [block.text.lower() for _, block in _blocks(chapter) if block.level]
    return [
        f"no heading that starts with {section!r}"
        for section in SECTIONS
        if not any(title.startswith(section.lower()) for title in titles)
    ]


def claims_table(chapter: Chapter) -> list[str]:
    """Under "Claims", a table with at least two columns and one claim."""
    tokens = [t for cell in _section(chapter, "Claims") for t in prose.tokens(cell)]
    columns = sum(token.type == "th_open" for token in tokens)
    rows = sum(token.type == "tr_open" for token in tokens) - 1
    if columns >= 2 and rows >= 1:
        return []
    return ["no table of claims and their checks under the heading Claims"]


def questions(chapter: Chapter) -> list[str]:
    """At least five questions, each with a folded answer; at least two with a cell that checks."""
    found = []
    start, end = _section_range(chapter, "Check your understanding")
    cells = chapter.notebook.cells[start:end]
    answers = sum(c.source.count("<details>") for c in cells if c.cell_type == "markdown")
    checks = sum(c.cell_type == "code" for c in cells)
    if answers < QUESTIONS:
        found.append(f"{answers} answers in <details>; at least {QUESTIONS} questions need one")
    if checks < CODE_QUESTIONS:
        found.append(f"{checks} code cells among the questions; at least {CODE_QUESTIONS}")
    return found


def details_render(chapter: Chapter) -> list[str]:
    """Markdown inside <details> is rendered only between blank lines."""
    found = []
    for cell in chapter.markdown:
        source = _outside_fences(cell.source)
        opened = len(re.findall(r"^<details>", source, re.MULTILINE))
        right = re.findall(
            r"(?:\A|\n\n)<details>\n<summary>[^\n]*</summary>\n\n.*?\n\n</details>(?=\n\n|\n*\Z)",
            source,
            re.DOTALL,
        )
        if not opened == len(right) == source.count("</details>") == source.count("<details>"):
            found.append(
                f"cell {cell.id}: write <details>, <summary>…</summary> on its own line, a blank "
                "line, the answer, a blank line, </details>, and blank lines around it all"
            )
        if re.search(r"<summary>[^\n]*[$`*]", source):
            found.append(f"cell {cell.id}: math and Markdown in <summary> show raw")
    return found


def links(chapter: Chapter) -> list[str]:
    """Links resolve. They name no heading: its address differs between viewers.

    `#cell-id=ID` leads to a code cell of the same chapter in the HTML and in JupyterLab. The HTML
    has no such address for Markdown.
    """
    found = []
    ids = {cell.id for cell in chapter.notebook.cells if cell.cell_type == "code"}
    for cell in chapter.markdown:
        for target in _targets(cell.source):
            if target.startswith(CELL_LINK):
                if target.removeprefix(CELL_LINK) not in ids:
                    found.append(f"cell {cell.id}: {target} names no code cell of this chapter")
                continue
            if re.match(r"https://|mailto:", target):
                continue
            if "#" in target:
                found.append(f"cell {cell.id}: {target} points at a heading; link the page")
            elif re.match(r"\w+:|/", target):
                found.append(f"cell {cell.id}: {target} is no relative path and no https link")
            elif not (chapter.path.parent / target).is_file():
                found.append(f"cell {cell.id}: {target} does not exist")
    return found


def _blocks(chapter: Chapter) -> Iterator[tuple[NotebookNode, prose.Block]]:
    return ((cell, block) for cell in chapter.markdown for block in prose.blocks(cell.source))


def _section_range(chapter: Chapter, title: str) -> tuple[int, int]:
    """The cells from the one with this heading up to the next heading of its level or above."""
    start, level = -1, 0
    for index, cell in enumerate(chapter.notebook.cells):
        if cell.cell_type != "markdown":
            continue
        for block in prose.blocks(cell.source):
            if start >= 0 and block.level and block.level <= level and index > start:
                return start, index
            if start < 0 and block.level and block.text.lower().startswith(title.lower()):
                start, level = index, block.level
    return (start, len(chapter.notebook.cells)) if start >= 0 else (0, 0)


def _section(chapter: Chapter, title: str) -> list[str]:
    start, end = _section_range(chapter, title)
    return [c.source for c in chapter.notebook.cells[start:end] if c.cell_type == "markdown"]


def _outside_fences(source: str) -> str:
    """The Markdown without its fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", source, flags=re.MULTILINE | re.DOTALL)


def _targets(source: str) -> Iterator[str]:
    for token in prose.tokens(source):
        if token.type == "link_open":
            yield str(token.attrs["href"])
        elif token.type == "image":
            yield str(token.attrs["src"])
