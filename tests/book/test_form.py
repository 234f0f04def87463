"""How chapters read: every rule of the form holds, and is broken once to see that it notices."""

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from oracles.sample_chapter import ALT, sample, stdout

from tools import exercises, folding, form_rules, notebooks, number_rules, reading, rules
from tools.chapter import Chapter, load

CHAPTERS = sorted(notebooks.BOOK.glob("*.ipynb"))
Rule = Callable[[Chapter], list[str]]
Spoil = Callable[[NotebookNode], None]


def chapter_of(notebook: NotebookNode) -> Chapter:
    return Chapter(Path("book/01-sample.ipynb"), notebooks.dumps(notebook), notebook)


def cell(notebook: NotebookNode, name: str) -> NotebookNode:
    return next(c for c in notebook.cells if c.id == name)


# The book ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", rules.FORM, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter_keeps_form(path: Path, rule: Rule) -> None:
    assert rule(load(path, "")) == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_checks_know_right_from_wrong(path: Path) -> None:
    assert [(e.name, fault) for e, fault in exercises.judged(load(path, ""))] == []


# The rules ---------------------------------------------------------------------------------------


def replace(name: str, old: str, new: str) -> Spoil:
    def spoil(notebook: NotebookNode) -> None:
        assert old in cell(notebook, name).source
        cell(notebook, name).source = cell(notebook, name).source.replace(old, new)

    return spoil


def say(text: str) -> Spoil:
    return replace("statement", "One token takes", f"{text} One token takes")


def tags(name: str, *given: str) -> Spoil:
    return lambda notebook: cell(notebook, name).metadata.update(tags=list(given))


def prints(name: str, text: str) -> Spoil:
    return lambda notebook: cell(notebook, name).update(outputs=[stdout(text)])


def move(name: str, before: str) -> Spoil:
    def spoil(notebook: NotebookNode) -> None:
        moved = cell(notebook, name)
        notebook.cells.remove(moved)
        notebook.cells.insert(notebook.cells.index(cell(notebook, before)), moved)

    return spoil


def drop(name: str) -> Spoil:
    return lambda notebook: notebook.cells.remove(cell(notebook, name))


def redraw(notebook: NotebookNode) -> None:
    cell(notebook, "plot").outputs[0].data["image/png"] = "YW5vdGhlcg==\n"


def set_alt(notebook: NotebookNode) -> None:
    cell(notebook, "plot").metadata.mystnb.image["alt"] = f"{ALT} The curve is blue."


TABLE = "P    n    rows\n1    8      36\n1   64   2,080\n"

PLANTED: list[tuple[Rule, Spoil]] = [
    *((form_rules.sections_in_order, drop(name)) for name in ("short", "build", "keep", "engines")),
    (form_rules.sections_in_order, move("lens", before="broken")),
    (form_rules.sections_in_order, replace("build", "## Build it", "So.\n\n## Build it")),
    (form_rules.first_screen, replace("title", "**5,050**", "5,050")),
    (form_rules.first_screen, replace("title", "*About 1 minutes.*", "")),
    (form_rules.first_screen, replace("title", "*About 1 minutes.*", "*About 9 minutes.*")),
    (form_rules.in_short, replace("short", "5. E\n", "")),
    (form_rules.takeaways, replace("statement", "> **Keep.** The sum", "The sum")),
    (form_rules.takeaways, replace("keep", "> **Keep.** Count", "Count")),
    (form_rules.setup_folded, tags("install-kvbook")),
    (form_rules.fold_tags, tags("count", "hide-input")),
    (form_rules.proofs_beside, replace("count", "rows =", "assert 1\nassert 2\nrows =")),
    (form_rules.proofs_beside, replace("count", "rows =", "a = 1\n" * 40 + "rows =")),
    (form_rules.evidence_announced, move("proof", before="statement")),
    (form_rules.no_text_tables, prints("count", TABLE)),
    (form_rules.no_text_tables, prints("count", "x" * 89)),
    (form_rules.no_color_words, say("Only the dark squares are new.")),
    (form_rules.no_color_words, set_alt),
    (form_rules.claims_linked, replace("claims", "(#cell-id=count)", "(intro.md)")),
    (form_rules.within_budget, say("word " * 2_400)),
    (form_rules.within_budget, replace("count", "rows =", "a = 1\n" * 221 + "rows =")),
    (form_rules.figures_sealed, redraw),
    (exercises.exercises_formed, drop("stub-total")),
    (exercises.exercises_formed, drop("rejects-total")),
    (exercises.exercises_formed, move("solution-total", before="stub-total")),
    (exercises.exercises_formed, replace("stub-total", "def total", "def other")),
    (number_rules.units_agree, say("It takes 128 s.")),
    (number_rules.units_agree, say("It takes 100 % of it.")),
    (number_rules.no_spelled_fractions, say("That is four fifths.")),
]


@pytest.mark.parametrize(
    ("rule", "spoil"), PLANTED, ids=[f"{i}-{rule.__name__}" for i, (rule, _) in enumerate(PLANTED)]
)
def test_rule_notices(rule: Rule, spoil: Spoil) -> None:
    notebook = sample()
    assert rule(chapter_of(notebook)) == []
    spoil(notebook)
    assert rule(chapter_of(notebook)) != []


def test_every_rule_is_broken_at_least_once() -> None:
    assert {rule for rule, _ in PLANTED} == set(rules.FORM)


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("check-total", "if given != 6", "if given is None", "accepts"),
        (
            "check-total",
            'f"total(3) gave {given}, expected 6; is the last one counted?"',
            '"No"',
            "says only",
        ),
        ("solution-total", "n + 1", "n - 1", "rejects 'the solution'"),
        ("rejects-total", "sum(range(n + 1))", "n", "rejects 'a loop'"),
        ("rejects-total", '"one row each": lambda n: n,', "", "2 wrong answers"),
    ],
)
def test_a_check_that_fails_its_purpose_is_noticed(
    name: str, old: str, new: str, said: str
) -> None:
    notebook = sample()
    assert list(exercises.judged(chapter_of(notebook))) == []
    replace(name, old, new)(notebook)
    found = [fault for _, fault in exercises.judged(chapter_of(notebook))]
    assert any(said in fault for fault in found)


# Folding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "lines", "html", "code", "output", "label"),
    [
        ("setup", 0, ["hide-input"], True, False, "Setup"),
        ("evidence", 1, ["hide-input"], True, False, "Evidence"),
        ("evidence", 2, ["hide-cell"], True, True, "Evidence"),
        ("solution", 1, ["hide-cell"], True, True, "One solution"),
        ("check", 1, ["hide-input"], True, False, "The check"),
        ("plot", 1, ["hide-input"], True, False, "Plotting code"),
        ("table", 1, ["hide-input"], True, False, "Code of this table"),
        ("answer", 1, ["hide-output"], False, True, "I have predicted: show"),
    ],
)
def test_one_tag_folds_in_three_viewers(
    tag: str, lines: int, html: list[str], code: bool, output: bool, label: str
) -> None:
    given = nbformat.v4.new_code_cell("x = 1", id="a", metadata={"tags": [tag]})
    given.outputs = [stdout("seen\n" * lines)] if lines else []
    folding.apply(given)
    assert given.metadata.tags == [tag, *html]
    assert given.metadata.jupyter == {
        **({"source_hidden": True} if code else {}),
        **({"outputs_hidden": True} if output else {}),
    }
    assert given.metadata.get("cellView") == ("form" if code else None)
    assert given.metadata.get("collapsed", False) == output
    assert given.source == (f"# @title {label}\nx = 1" if code else "x = 1")
    assert given.metadata.mystnb.code_prompt_show == label

    again = nbformat.from_dict(given)
    folding.apply(again)
    assert again == given


def test_a_tag_that_is_taken_away_unfolds_again() -> None:
    notebook = sample()
    cell(notebook, "proof").metadata["tags"] = []
    cell(notebook, "proof").metadata["jupyter"] = {}
    unfolded = cell(notebooks.normalize(notebook), "proof")
    assert unfolded.source == "print(rows)\nprint(tokens)"
    assert unfolded.metadata == {}


# Length ------------------------------------------------------------------------------------------


def test_the_main_path_ends_with_keep_and_leaves_proofs_out() -> None:
    notebook = sample()
    kept = [c.id for c in reading.cells(notebook)]
    assert kept == [
        *("title", "short", "by-hand", "build", "count", "statement", "bytes", "real", "keep"),
    ]
    printed = reading.markdown(notebook)
    assert "sum(range(1, tokens + 1))" in printed
    assert "ratio 50.5x" in printed
    assert "print(tokens)" not in printed
    assert "Break it" not in printed


def test_length_counts_words_lines_and_minutes() -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell(
                "# A title\n\n*About 0 minutes.*\n\nThree words $x$.\n\n$$y$$"
            ),
            nbformat.v4.new_code_cell("a = 1\n\nprint(a)", outputs=[stdout("1 2 3\n")]),
        ]
    )
    length = reading.of(notebook)
    assert (length.words, length.printed, length.lines, length.figures) == (6, 3, 2, 1)
    assert reading.Length(1_500, 0, 150, 4).minutes == 10 + 10 + 2
    assert reading.Length(2_300, 0, 220, 10).faults == []
    assert len(reading.Length(2_301, 0, 221, 20).faults) == 3
