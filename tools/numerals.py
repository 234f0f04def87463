"""The numerals in a text: where they stand, what they are worth, and which of them are claims.

Knows how numbers are written in prose, in code, in LaTeX and in printed output. Does not know
notebooks or where a number came from. A numeral is one of three things:

- a **claim**, which must be bound to code: two or more digits, or one digit with a unit ("2 MiB",
  "3 layers", "8-bit"), a factor ("4×") or an equals sign before it ("T = 1");
- **bare**: one digit with none of these ("layer 0", the 2 of "n²");
- a **name**: digits that count nothing ("Llama-3-8B", "float32", "2.13.0", "chapter 12", "2017",
  anything under "Further reading", and the table of givens below).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tools.prose import Block, Span

SIZES = {
    *("bit", "bits", "byte", "bytes", "B", "b"),
    *("KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB", "TB"),
    *("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "KiB/s", "MiB/s", "GiB/s", "TiB/s"),
}
TIMES = {"ns", "us", "µs", "μs", "ms", "s", "min", "h", "Hz", "kHz", "MHz", "GHz"}
TIMES |= {"second", "seconds", "minute", "minutes", "hour", "hours", "day", "days"}
RATIOS = {"×", "x", "%", "times", "percent", "fold"}
WORK = {"FLOP", "FLOPs", "MFLOP", "MFLOPs", "GFLOP", "GFLOPs", "TFLOP", "TFLOPs", "FLOP/s"}
WORK |= {"GFLOP/s", "TFLOP/s", "FLOP/B", "FLOPs/B", "FLOP/byte", "FLOPs/byte", "tokens/s"}
COUNTS = {
    *("token", "tokens", "key", "keys", "value", "values", "query", "queries", "head", "heads"),
    *("layer", "layers", "row", "rows", "column", "columns", "block", "blocks", "slot", "slots"),
    *("position", "positions", "step", "steps", "pass", "passes", "call", "calls"),
    *("parameter", "parameters", "element", "elements", "entry", "entries", "number", "numbers"),
    *("cache", "caches", "sequence", "sequences", "request", "requests", "prompt", "prompts"),
    *("word", "words", "logit", "logits", "weight", "weights", "vector", "vectors"),
    *("matrix", "matrices", "projection", "projections", "product", "products"),
    *("multiplication", "multiplications", "addition", "additions", "dimension", "dimensions"),
    *("channel", "channels", "group", "groups", "chunk", "chunks", "forward", "forwards"),
    *("digit", "digits", "decimal", "decimals", "place", "places", "run", "runs", "wide"),
}
UNITS = SIZES | TIMES | RATIOS | WORK | COUNTS

# Units that may touch their number ("128KiB", "4x"). Other letters make a name of it ("70B").
TOUCHING = (SIZES | TIMES | RATIOS) - {"B", "b", "h", "times", "percent", "fold"}

# Phrases whose digits are part of a name and that no rule below recognizes.
GIVENS = {
    "IEEE 754": "the name of a standard",
    "Apache 2.0": "the name of a license",
    "Llama 2": "a model family; its name does not hyphenate",
    "Llama 3": "a model family; its name does not hyphenate",
    "Mistral 7B": "a model; its name does not hyphenate",
}

NUMERAL = re.compile(
    r"(?:[0-9]{1,3}(?:[,_][0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
)
_UNIT = re.compile(r"(\s*|-)(%|×|[^\W\d_]+(?:/[^\W\d_]+)?)(?:\s([^\W\d_]+))?")
_WORD_BEFORE = re.compile(r"[\w.-]*$")
_WORD_AFTER = re.compile(r"(?:[\w-]|\.(?=\w))*")
_EQUALS = re.compile(r"[=≈×]\s*$")
_YEAR = re.compile(r"(?:19[5-9][0-9]|20[0-3][0-9])$")
_REFERENCE = re.compile(
    r"\b(?:chapters?|parts?|sections?|figures?|tables?|equations?|questions?|answers?|exercises?"
    r"|python|versions?|arxiv)\s+(?:[0-9.]+\s*(?:,|–|-|to|and|or)\s*)*$",
    re.IGNORECASE,
)
_HEADING_NUMBER = re.compile(r"\s*[0-9]+(?:\.[0-9]+)*\.?\s")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_POWER = r"10\s*\^\s*(?:\{\s*([+-]?[0-9]+)\s*\}|([+-]?[0-9]+))"


@dataclass(frozen=True)
class Numeral:
    """A number found in a text.

    value: canonical spelling, "131072" or "-1.07e9"; trailing zeros are kept, "0.50" is not "0.5"
    unit:  the unit that follows, or "" if none does
    text:  what a reader sees, "131,072 B"; the whole name for a name
    kind:  "claim", "bare" or "name"
    """

    value: str
    unit: str
    text: str
    kind: str


def of_chapter(cells: list[list[Block]]) -> list[list[Numeral]]:
    """The numerals of each Markdown cell of a chapter, names and bare digits included.

    The cells are read together because a "Further reading" section may span several of them.
    """
    found = []
    reading_level = 0  # level of the open "Further reading" heading, 0 outside of it
    for cell in cells:
        numerals: list[Numeral] = []
        for block in cell:
            if block.level and reading_level >= block.level:
                reading_level = 0
            if block.level and block.text.strip().lower() == "further reading":
                reading_level = block.level
            numerals += of_block(block, names_only=reading_level > 0)
        found.append(numerals)
    return found


@cache  # the tests change one block of a chapter at a time, thousands of times
def of_block(block: Block, names_only: bool = False) -> tuple[Numeral, ...]:
    """The numerals of one visible block, in reading order."""
    text, kinds = _flatten(block.spans)
    names = _given_ranges(text)
    if block.level and (number := _HEADING_NUMBER.match(text)):
        names.append(number.span())
    if names_only:
        names.append((0, len(text)))
    return tuple(_scan(text, kinds, names))


def of_line(line: str) -> list[Numeral]:
    """The numerals of a printed line. Digits inside a name are left out; nothing else is."""
    text = _plain_powers(line)
    return [n for n in _scan(text, ["code"] * len(text), [], refer=False) if n.kind != "name"]


def canonical(numeral: str) -> str:
    """One spelling per number as printed: `131,072` and `131_072` agree, `1.0e+09` is `1.0e9`."""
    mantissa, _, exponent = numeral.lower().replace(",", "").replace("_", "").partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _flatten(spans: tuple[Span, ...]) -> tuple[str, list[str]]:
    """The block as one string (so "**4** ×" keeps its factor) and the kind of each character."""
    text = ""
    kinds: list[str] = []
    for span in spans:
        plain = _plain_powers(_plain_math(span.text) if span.kind == "math" else span.text)
        text += plain
        kinds += [span.kind] * len(plain)
    return text, kinds


def _plain_math(latex: str) -> str:
    latex = re.sub(r"(?<=[0-9])(?:\{,\}|\\,)(?=[0-9]{3}(?![0-9]))", ",", latex)
    latex = re.sub(r"\\(?:text|mathrm|textrm|operatorname)\{([^{}]*)\}", r" \1", latex)
    latex = latex.replace(r"\times", "×").replace(r"\approx", "≈").replace(r"\%", "%")
    return re.sub(r"\\[,;:! ]|\\q?quad|~|\\cdot", " ", latex)


def _plain_powers(text: str) -> str:
    """`1.07 × 10^{9}` becomes `1.07e9` and `10^{-12}` becomes `1e-12`; minus signs become "-"."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda m: "^" + m[0].translate(_SUPERSCRIPTS), text)
    text = text.replace("−", "-").replace("10**", "10^")
    text = re.sub(rf"(?<=[0-9])\s*×\s*{_POWER}", r"e\1\2", text)
    return re.sub(rf"(?<![0-9.,_]){_POWER}", r"1e\1\2", text)


def _given_ranges(text: str) -> list[tuple[int, int]]:
    return [m.span() for given in GIVENS for m in re.finditer(rf"\b{re.escape(given)}\b", text)]


def _scan(
    text: str, kinds: list[str], names: list[tuple[int, int]], refer: bool = True
) -> Iterator[Numeral]:
    end_of_name = 0
    for match in NUMERAL.finditer(text):
        start, end = match.span()
        if start < end_of_name:
            continue
        before, after = text[:start], text[end:]
        if _is_attached(before, after, kinds[start]):
            first = len(_WORD_BEFORE.sub("", before))
            last = _WORD_AFTER.match(text, end)
            end_of_name = last.end() if last else end
            yield Numeral(canonical(match[0]), "", text[first:end_of_name], "name")
            continue
        sign = "-" if re.search(r"(?:^|[^\w)\]}-])-$", before) else ""
        unit = unit_after(after)
        seen = sign + match[0] + (f" {unit}" if unit else "")
        named = any(a <= start and end <= b for a, b in names)
        year = kinds[start] == "text" and _YEAR.match(match[0]) and not unit
        kind = "bare"
        if named or (refer and (year or _REFERENCE.search(before))):
            kind = "name"
        elif sum(c.isdigit() for c in match[0]) > 1 or unit or _EQUALS.search(before):
            kind = "claim"
        yield Numeral(sign + canonical(match[0]), unit, seen, kind)


def _is_attached(before: str, after: str, kind: str) -> bool:
    """True for digits that belong to a word: float32, Llama-3, 70B, 2.13.0."""
    if re.search(r"[^\W\d]$|\w\.$", before) and not (kind == "math" and before.endswith("_")):
        return True
    if kind == "math":  # here a letter after is a factor and a hyphen before is a minus
        return False
    if re.search(r"[^\W\d_]-$", before) or re.match(r"\.[0-9]", after):
        return True
    letters = re.match(r"[^\W\d]\w*", after)
    return letters is not None and letters[0] not in TOUCHING


def unit_after(after: str) -> str:
    """The unit that follows a number, one adjective allowed between: "3 layers", "3 KV heads"."""
    match = _UNIT.match(after)
    if match is None or (match[2] == "x" and match[1]):  # "4x" is a factor, "4 x" is not
        return ""
    if match[2] in UNITS:
        return match[2]
    return match[3] if match[3] in COUNTS else ""
