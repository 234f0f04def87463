"""Numbers in the prose: what is read, what it is bound to, and that no change slips through."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbformat import NotebookNode
from oracles.sample_chapter import sample

from tools import notebooks, number_words, numbers, numerals, prose, units

CHAPTERS = sorted(notebooks.BOOK.glob("*.ipynb"))


def read(markdown: str) -> list[tuple[str, str, str]]:
    """(kind, value, unit) of each numeral of a Markdown text."""
    found = numerals.of_chapter([prose.blocks(markdown)])[0]
    return [(numeral.kind, numeral.value, numeral.unit) for numeral in found]


def cell(notebook: NotebookNode, name: str) -> NotebookNode:
    return next(c for c in notebook.cells if c.id == name)


# What is read ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("markdown", "value"),
    [
        ("131,072", "131072"),
        ("`131_072`", "131072"),
        ("$131{,}072$", "131072"),
        (r"$131\,072$", "131072"),
        ("16,384.50", "16384.50"),
        (r"$1.07\times10^{9}$", "1.07e9"),
        ("1.07 × 10⁹", "1.07e9"),
        ("1.07e+09", "1.07e9"),
        ("$10^{-12}$", "1e-12"),
        ("$10^{−12}$", "1e-12"),
        ("`1e-12`", "1e-12"),
        ("`10**-12`", "1e-12"),
        ("10⁻¹²", "1e-12"),
        ("−17", "-17"),
        ("0.50", "0.50"),
    ],
)
def test_one_number_has_one_spelling(markdown: str, value: str) -> None:
    assert read(markdown) == [("claim", value, "")]


def test_a_space_never_joins_two_numbers() -> None:
    assert read("131 072") == [("claim", "131", ""), ("claim", "072", "")]


def test_a_comma_joins_groups_of_three_digits_alone() -> None:
    assert read("(64,1280)") == [("claim", "64", ""), ("claim", "1280", "")]


@pytest.mark.parametrize(
    ("markdown", "value", "unit"),
    [
        ("2 MiB", "2", "MiB"),
        ("**2** MiB", "2", "MiB"),
        (r"$2\,\text{MiB}$", "2", "MiB"),
        ("8-bit", "8", "bit"),
        ("4×", "4", "×"),
        ("4x", "4", "x"),
        (r"$4\times$", "4", "×"),
        ("3 layers", "3", "layers"),
        ("3 KV heads", "3", "heads"),
        ("5%", "5", "%"),
        ("128KiB", "128", "KiB"),
    ],
)
def test_one_digit_with_a_unit_or_a_factor_is_a_claim(markdown: str, value: str, unit: str) -> None:
    assert read(markdown) == [("claim", value, unit)]


@pytest.mark.parametrize("markdown", ["$C = 4$", "`C = 4`", "weight ≈ 4"])
def test_one_digit_after_an_equals_sign_is_a_claim(markdown: str) -> None:
    assert read(markdown) == [("claim", "4", "")]


@pytest.mark.parametrize(
    "markdown", ["layer 0", "$n^2$", "`x[0]`", "2-D", "the 3 that remain", "4 x"]
)
def test_one_digit_alone_is_bare(markdown: str) -> None:
    assert [kind for kind, _, _ in read(markdown)] == ["bare"]


@pytest.mark.parametrize(
    "markdown",
    [
        *("Llama-3-8B", "float32", "H100", "2.13.0", "SmolLM2-135M", "a 70B model", "v0.11"),
        *("chapter 12", "Chapters 10 to 12", "sections 10, 11 and 12", "Python 3.11", "figure 10"),
        *("in 2017", "IEEE 754", "Apache 2.0", "## 12. Title"),
        "## Further reading\n\n- pages 33 to 44",
    ],
)
def test_digits_in_names_are_no_claims(markdown: str) -> None:
    found = read(markdown)
    assert found
    assert {kind for kind, _, _ in found} == {"name"}


def test_a_year_is_only_a_year_outside_code_and_without_a_unit() -> None:
    assert read("`2016` and 2016 tokens") == [
        ("claim", "2016", ""),
        ("claim", "2016", "tokens"),
    ]
    assert read("2048") == [("claim", "2048", "")]


def test_list_markers_link_targets_and_tags_are_not_seen() -> None:
    markdown = '12. [text](page-34.md) <b id="56">word</b>\n'
    assert read(markdown) == []


def test_headings_tables_details_and_fences_are_seen() -> None:
    markdown = (
        "## A head of 64\n\n| a |\n|---|\n| 65 |\n\n"
        "<details>\n<summary>Answer 66</summary>\n\n67\n\n</details>\n\n```python\nx = 68\n```\n"
    )
    assert [value for _, value, _ in read(markdown)[:2]] == ["64", "65"]
    assert [value for _, value, _ in read(markdown)[3:]] == ["67", "68"]


def test_further_reading_ends_with_the_next_heading_of_its_level() -> None:
    cells = ["## Further reading\n\n- 11", "### More\n\n- 22", "## After\n\n33"]
    found = numerals.of_chapter([prose.blocks(source) for source in cells])
    assert [[n.kind for n in cell] for cell in found] == [["name"], ["name"], ["claim"]]


def test_every_given_has_a_reason_and_a_number() -> None:
    for given, reason in numerals.GIVENS.items():
        assert re.search("[0-9]", given)
        assert len(reason) > 10


@pytest.mark.parametrize(
    ("markdown", "kind", "value", "unit"),
    [
        ("four layers", "claim", "4", "layers"),
        ("Twelve KV heads", "claim", "12", "heads"),
        ("thirty-two tokens", "claim", "32", "tokens"),
        ("three times", "claim", "3", "times"),
        ("two of them", "bare", "2", ""),
        ("twice", "bare", "2", ""),
        ("## In two minutes", "bare", "2", "minutes"),
    ],
)
def test_number_words_are_read(markdown: str, kind: str, value: str, unit: str) -> None:
    (found,) = number_words.of_block(prose.blocks(markdown)[0])
    assert (found.kind, found.value, found.unit) == (kind, value, unit)


@pytest.mark.parametrize("markdown", ["one row", "someone, often", "`two`", "$two$"])
def test_what_is_no_number_word(markdown: str) -> None:
    assert number_words.of_block(prose.blocks(markdown)[0]) == []


@pytest.mark.parametrize("markdown", ["four fifths", "a third of it", "one half", "two-thirds"])
def test_fractions_in_words_are_seen(markdown: str) -> None:
    assert len(number_words.fractions(prose.blocks(markdown)[0])) == 1


@pytest.mark.parametrize("spoken", ["for three passes", "for 2 passes of twelve layers"])
def test_a_changed_number_word_is_noticed(spoken: str) -> None:
    notebook = sample()
    before = numbers.bind_chapter("01-sample", notebook)
    cell(notebook, "real").source = f"## On a real model\n\n{spoken}"
    assert numbers.bind_chapter("01-sample", notebook) != before


def test_a_changed_alt_text_is_noticed() -> None:
    notebook = sample()
    before = numbers.bind_chapter("01-sample", notebook)
    alt = cell(notebook, "plot").metadata.mystnb.image
    alt["alt"] = alt["alt"].replace("hundred", "thousand")
    assert numbers.bind_chapter("01-sample", notebook) != before
    alt["alt"] = "A line that rises to 77 rows."
    assert "77 rows is in no code" in numbers.bind_chapter("01-sample", notebook)[1][0]


def test_literals_of_plotting_code_are_no_evidence() -> None:
    notebook = sample()
    cell(notebook, "plot").source = "plot(777)"
    cell(notebook, "statement").source += "\n\nIt takes 777 steps."
    assert "777 steps is in no code" in numbers.bind_chapter("01-sample", notebook)[1][0]


# Units -------------------------------------------------------------------------------------------


def test_a_number_in_a_table_has_the_unit_of_its_column() -> None:
    lines = [
        "| B | size (KiB) | rows read | bytes |",
        "|---|---:|---:|---:|",
        "| 8 | 24 | 3 | 4 s |",
    ]
    read = [(found.value, unit) for _, _, found, unit in units.of_lines(lines)]
    assert read == [("8", ""), ("24", "KiB"), ("3", "rows"), ("4", "s")]


@pytest.mark.parametrize("same", ["B bytes", "x ×", "× times", "% percent", "s seconds"])
def test_units_of_one_kind_are_one(same: str) -> None:
    first, second = same.split()
    assert units.canonical(first) == units.canonical(second)


def test_units_of_two_kinds_are_two() -> None:
    assert len({units.canonical(u) for u in ("B", "bits", "KiB", "s", "ms", "×", "%", "")}) == 8


def test_a_measured_claim_goes_to_a_line_with_its_unit_however_far() -> None:
    far, near = (
        numbers.Place(i, f"c{i}", "out", 1, f"line {i}", u) for i, u in ((1, "B"), (9, ""))
    )
    claim = [(9, "here", [numerals.Numeral("64", "bytes", "64 bytes", "claim")])]
    assert numbers.bind("ch", claim, {"64": [far, near]})[0][0].endswith("line 1")


# What counts as evidence -------------------------------------------------------------------------


def test_literals_come_from_the_syntax_tree() -> None:
    source = 'a = 1_024  # 33\nb = "44"\nc = f"{a:.55f}"\nd = [-66, 0.50, 1e-09]\ne = 10**-12\n'
    assert numbers.literals(source) == [
        ("1024", 1),
        ("-66", 4),
        ("0.50", 4),
        ("1e-9", 4),
        ("1e-12", 5),
        ("10", 5),
        ("-12", 5),
    ]


def test_magic_lines_are_not_python_and_are_passed_over() -> None:
    assert numbers.literals("if True:\n    %pip install x==22\ny = 33") == [("33", 3)]


def test_timings_stderr_and_figures_are_no_evidence() -> None:
    notebook = sample()
    cell(notebook, "count").metadata["tags"] = ["nbval-ignore-output"]
    assert numbers.printed_lines(cell(notebook, "count")) == []
    cell(notebook, "bytes").outputs[0].name = "stderr"
    assert numbers.printed_lines(cell(notebook, "bytes")) == []
    assert numbers.printed_lines(cell(notebook, "plot")) == []


def test_the_message_of_an_announced_error_is_evidence() -> None:
    notebook = sample()
    error = {"output_type": "error", "ename": "ValueError", "evalue": "room for 16"}
    failing = cell(notebook, "count")
    failing.outputs = [NotebookNode(error, traceback=[])]
    assert numbers.printed_lines(failing) == []
    failing.metadata["tags"] = ["raises-exception"]
    assert numbers.printed_lines(failing) == ["room for 16"]


# What is bound -----------------------------------------------------------------------------------


def test_the_lock_says_where_each_number_came_from() -> None:
    lines, missing = numbers.bind_chapter("01-sample", sample())
    assert missing == []
    assert lines == [
        "01-sample | title | 5,050 rows <- count out 1 | 100 tokens: 5,050 rows",
        "01-sample | title | 100 tokens <- count out 1 | 100 tokens: 5,050 rows",
        "01-sample | title | 100 <- count out 1 | 100 tokens: 5,050 rows",
        "01-sample | by-hand words | no claims: two_minutes two",
        "01-sample | statement | 131,072 bytes <- bytes out 1 | 131,072 bytes = 128 KiB",
        "01-sample | statement | 128 KiB <- bytes out 1 | 131,072 bytes = 128 KiB",
        "01-sample | statement | 131,072 bytes <- bytes out 1 | 131,072 bytes = 128 KiB",
        "01-sample | statement | 1e-12 <- bytes code 3 | assert abs(0.1 + 0.2 - 0.3) < 1e-12",
        "01-sample | statement | 50.5 × <- count out 2 | ratio 50.5x",
        "01-sample | statement | 50.5 × <- count out 2 | ratio 50.5x",
        "01-sample | statement | 100 <- count out 1 | 100 tokens: 5,050 rows",
        "01-sample | statement | 5,050 <- count out 1 | 100 tokens: 5,050 rows",
        "01-sample | statement | no claims: 0 float32 Llama-3-8B 12",
        "01-sample | statement words | two passes <- solution-total code 3 "
        "| return n * (n + 1) // 2",
        "01-sample | real | 2 passes <- solution-total code 3 | return n * (n + 1) // 2",
        "01-sample | plot alt | hundred rows <- proof out 2 | 100",
        "01-sample | claims | 5_050 <- proof out 1 | 5050",
        "01-sample | reading | no claims: 2017 33 44",
    ]


def test_the_nearest_line_wins_and_the_same_unit_wins_over_a_near_one() -> None:
    def places(*described: tuple[int, str, str]) -> dict[str, list[numbers.Place]]:
        return {"64": [numbers.Place(i, f"c{i}", k, 1, f"{k} {i}", u) for i, k, u in described]}

    prose_64 = [(5, "here", [numerals.Numeral("64", "tokens", "64 tokens", "claim")])]

    def winner(*described: tuple[int, str, str]) -> str:
        return numbers.bind("ch", prose_64, places(*described))[0][0].split(" | ")[-1]

    assert winner((1, "out", "tokens"), (4, "out", "tokens")) == "out 4"
    assert winner((4, "out", ""), (3, "out", "token")) == "out 3"
    assert winner((4, "out", ""), (1, "out", "tokens")) == "out 4"
    assert winner((4, "code", ""), (3, "out", "")) == "out 3"
    assert winner((6, "out", "tokens"), (4, "out", "tokens")) == "out 4"


def test_a_number_found_nowhere_is_refused_with_its_place() -> None:
    notebook = sample()
    cell(notebook, "statement").source += "\n\nIt takes 777 steps."
    _, missing = numbers.bind_chapter("01-sample", notebook)
    assert missing == [
        "01-sample, cell statement: 777 steps is in no code literal and no non-timing output of "
        "this chapter; print it or state it in code"
    ]


def test_rounding_is_not_agreement() -> None:
    notebook = sample()
    cell(notebook, "statement").source += "\n\nThe ratio is 50.50×."
    assert len(numbers.bind_chapter("01-sample", notebook)[1]) == 1


def test_bind_writes_nothing_when_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "numbers.lock"
    path = tmp_path / "01-sample.ipynb"
    notebook = sample()
    notebooks.write(notebook, path)
    monkeypatch.setattr(numbers, "LOCK", lock)
    monkeypatch.setattr(notebooks, "chapters", lambda: [path])
    assert numbers.main(["check"]) == 1
    assert "make bind" in capsys.readouterr().err
    assert numbers.main(["bind"]) == 0
    assert numbers.main(["check"]) == 0
    before = lock.read_text()

    cell(notebook, "statement").source += "\n\nIt takes 100 steps, not 777 steps."
    notebooks.write(notebook, path)
    capsys.readouterr()
    assert numbers.main(["check"]) == 1
    assert numbers.main(["bind"]) == 1
    assert "777 steps" in capsys.readouterr().err
    assert lock.read_text() == before


def test_check_names_both_sides_of_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "01-sample.ipynb"
    notebook = sample()
    notebooks.write(notebook, path)
    lock, _ = numbers.derive([path])
    assert numbers.check([path], lock) == []
    cell(notebook, "count").outputs[0].text = "100 tokens: 5,050 rows\nratio 50.6x\n"
    notebooks.write(notebook, path)
    problems = numbers.check([path], lock)
    assert len(problems) == 4
    assert problems[0].startswith("01-sample, cell statement: 50.5 × is in no code literal")
    assert problems[2] == "-01-sample | statement | 50.5 × <- count out 2 | ratio 50.5x"


# The tester: every number is changed in turn -----------------------------------------------------

# Digits that no reader sees: list markers, link targets, attributes of tags.
UNSEEN = re.compile(r"^\s*[0-9]+[.)](?=\s)|\]\([^)]*\)|<[a-z][^>]*>", re.MULTILINE)


def changed(text: str) -> Iterator[tuple[str, str]]:
    """Each digit run of a text changed in three ways, with a description of the change.

    This finds digits in the raw text by itself, so that it does not share a blind spot with the
    code that it tests.
    """
    unseen = [match.span() for match in UNSEEN.finditer(text)]
    for match in re.finditer("[0-9]+", text):
        start, end = match.span()
        if any(a <= start and end <= b for a, b in unseen):
            continue
        run = match[0]
        others = {run[:-1] + str((int(run[-1]) + 1) % 10), run[1:], run + "0"} - {""}
        for other in sorted(others):
            around = text[max(0, start - 20) : end + 20].replace("\n", " ")
            yield text[:start] + other + text[end:], f"{run} to {other} in {around!r}"


def unnoticed_in_prose(notebook: NotebookNode) -> tuple[int, list[str]]:
    """How many changes were tried in the Markdown cells, and those that the lock did not notice."""
    evidence = numbers.evidence_of(notebook)
    cells = [(i, c) for i, c in enumerate(notebook.cells) if c.cell_type == "markdown"]
    parsed = [prose.blocks(cell.source) for _, cell in cells]
    locked = numerals.of_chapter(parsed)
    tried, missed = 0, []
    for at, (index, markdown) in enumerate(cells):
        before = numbers.bind("ch", [(index, markdown.id, locked[at])], evidence)
        for text, change in changed(markdown.source):
            numerals_now = numerals.of_chapter([*parsed[:at], prose.blocks(text)])[at]
            tried += 1
            if numbers.bind("ch", [(index, markdown.id, numerals_now)], evidence) == before:
                missed.append(f"{markdown.id}: {change}")
    return tried, missed


def unnoticed_in_results(notebook: NotebookNode) -> tuple[int, list[str]]:
    """The same for the printed lines that the lock quotes: one digit is added to each in turn."""
    locked = numbers.bind_chapter("ch", notebook)
    read_cells = numbers.numerals_of(notebook)
    tried, missed = 0, []
    for line in sorted(set(locked[0])):
        found = re.match(r"ch \| \S+ \| \S*?([0-9]+).* <- (\S+) out ([0-9]+) \| ", line)
        if not found:
            continue
        cells = copy.deepcopy(notebook)
        spoil_line(cell(cells, found[2]), int(found[3]), found[1])
        tried += 1
        if numbers.bind("ch", read_cells, numbers.evidence_of(cells)) == locked:
            missed.append(line)
    return tried, missed


def spoil_line(spoiled: NotebookNode, number: int, digits: str) -> None:
    """Appends a digit to the first of these digits in the given printed line of a cell."""
    before = 0
    for output in spoiled.outputs:
        holder, key = (
            (output, "text") if "text" in output else (output.get("data", {}), "text/plain")
        )
        lines = holder.get(key, "").splitlines()
        if before < number <= before + len(lines):
            at = number - before - 1
            lines[at] = re.sub(f"{digits}(?![0-9])", f"{digits}1", lines[at], count=1)
            holder[key] = "\n".join(lines)
        before += len(lines)


def test_every_changed_number_of_the_sample_is_noticed() -> None:
    tried, missed = unnoticed_in_prose(sample())
    assert tried == 80
    assert missed == []


def test_every_changed_result_of_the_sample_is_noticed() -> None:
    tried, missed = unnoticed_in_results(sample())
    assert tried == 9
    assert missed == []


def test_the_tester_sees_a_binding_that_lets_changes_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two weaker rules fail it: no bare digits or names in the lock; no quoted line in it."""
    strict = numbers.bind

    def claims_alone(*given: object) -> tuple[list[str], list[str]]:
        lines, missing = strict(*given)  # type: ignore[arg-type]
        return [line for line in lines if "no claims" not in line], missing

    monkeypatch.setattr(numbers, "bind", claims_alone)
    assert len(unnoticed_in_prose(sample())[1]) > 10

    def anywhere(*given: object) -> tuple[list[str], list[str]]:
        return [], strict(*given)[1]  # type: ignore[arg-type]

    monkeypatch.setattr(numbers, "bind", anywhere)
    assert len(unnoticed_in_prose(sample())[1]) > 20


def test_there_are_chapters() -> None:
    assert notebooks.chapters() == CHAPTERS


def test_the_lock_agrees_with_the_book() -> None:
    assert numbers.check(CHAPTERS, numbers.LOCK.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_changed_numbers_of_a_chapter_are_noticed(path: Path) -> None:
    notebook = notebooks.read(path)
    for tried, missed in (unnoticed_in_prose(notebook), unnoticed_in_results(notebook)):
        assert tried > 0
        noticed = 1 - len(missed) / tried
        assert noticed >= 0.98, "\n".join([f"{noticed:.1%} of {tried} noticed; not:", *missed])
