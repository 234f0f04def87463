"""Markdown as a reader sees it: blocks of text, code and math.

Knows CommonMark, tables and dollar math. Does not know notebooks, numbers or rules.
List markers, link targets and HTML tags are not seen by a reader, so they drop out here.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin

PARSER = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin)

_TAG = re.compile(r"<[^>]*>")


@dataclass(frozen=True)
class Span:
    """A run of characters of one kind: "text", "code" or "math"."""

    kind: str
    text: str


@dataclass(frozen=True)
class Block:
    """One paragraph, heading, table cell, code block or display equation.

    `level` is 1 to 6 for a heading and 0 for anything else.
    """

    spans: tuple[Span, ...]
    level: int = 0

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


def tokens(markdown: str) -> Iterator[Token]:
    """Every token of the document, inline tokens and their children included, in reading order."""
    return _flat(PARSER.parse(markdown))


def blocks(markdown: str) -> list[Block]:
    """The visible blocks of the document, in reading order."""
    found = []
    level = 0
    for token in PARSER.parse(markdown):
        if token.type == "heading_open":
            level = int(token.tag[1:])
        elif token.type == "heading_close":
            level = 0
        elif token.type == "inline":
            found.append(Block(tuple(_spans(token.children or [])), level))
        elif token.type in ("fence", "code_block"):
            found.append(Block((Span("code", token.content),)))
        elif token.type in ("math_block", "math_block_label"):
            found.append(Block((Span("math", token.content),)))
        elif token.type == "html_block":
            found.append(Block((Span("text", _TAG.sub(" ", token.content)),)))
    return found


def _flat(parsed: Iterable[Token]) -> Iterator[Token]:
    for token in parsed:
        yield token
        yield from _flat(token.children or [])


def _spans(children: list[Token]) -> Iterator[Span]:
    for token in children:
        if token.type == "code_inline":
            yield Span("code", token.content)
        elif token.type.startswith("math_inline"):
            yield Span("math", token.content)
        elif token.type == "text":
            yield Span("text", token.content)
        elif token.type in ("softbreak", "hardbreak"):
            yield Span("text", " ")
        elif token.type == "image":
            yield from _spans(token.children or [])
