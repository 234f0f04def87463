"""Every chapter keeps every rule; every rule is broken once to see that it notices."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from oracles.sample_chapter import ALT, figure, sample, stdout

from tools import cell_rules, notebooks, prose_rules, repository, rules
from tools.chapter import Chapter, load

CHAPTERS = sorted(notebooks.BOOK.glob("*.ipynb"))
Rule = Callable[[Chapter], list[str]]


def chapter_of(notebook: NotebookNode, folder: Path = Path("book")) -> Chapter:
    return Chapter(folder / "01-sample.ipynb", notebooks.dumps(notebook), notebook)


def cell(notebook: NotebookNode, name: str) -> NotebookNode:
    return next(c for c in notebook.cells if c.id == name)


# The book ----------------------------------------------------------------------------------------


def test_there_are_chapters() -> None:
    assert notebooks.chapters() == CHAPTERS


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter_keeps_rule(path: Path, rule: Rule) -> None:
    assert rule(load(path, repository.repository_url())) == []


def test_the_table_of_contents_lists_the_chapters_in_order() -> None:
    toc = (notebooks.ROOT / "_toc.yml").read_text(encoding="utf-8")
    assert rules.table_of_contents(notebooks.chapters(), toc) == []


# The rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*rules.RULES, *rules.FORM], ids=lambda rule: rule.__name__)
def test_the_sample_keeps_every_rule(rule: Rule) -> None:
    assert rule(chapter_of(sample())) == []


def set_source(name: str, source: str) -> Callable[[NotebookNode], None]:
    return lambda notebook: cell(notebook, name).update(source=source)


def add_prose(text: str) -> Callable[[NotebookNode], None]:
    def spoil(notebook: NotebookNode) -> None:
        cell(notebook, "statement").source += f"\n\n{text}\n"

    return spoil


def set_metadata(name: str, **metadata: object) -> Callable[[NotebookNode], None]:
    return lambda notebook: cell(notebook, name).metadata.update(nbformat.from_dict(metadata))


def set_outputs(name: str, *outputs: NotebookNode) -> Callable[[NotebookNode], None]:
    return lambda notebook: cell(notebook, name).update(outputs=list(outputs))


def set_count(name: str, count: int | None) -> Callable[[NotebookNode], None]:
    return lambda notebook: cell(notebook, name).update(execution_count=count)


def drop_cell(name: str) -> Callable[[NotebookNode], None]:
    return lambda notebook: notebook.cells.remove(cell(notebook, name))


def drop_code_questions(notebook: NotebookNode) -> None:
    kept = [c for c in notebook.cells if not c.id.endswith(("-total", "-summed"))]
    notebook.cells = kept


def figure_with(**changes: str | None) -> NotebookNode:
    """A figure output; "png" or "svg" set to None leaves that format out."""
    output = figure()
    for kind, data in changes.items():
        key = {"png": "image/png", "svg": "image/svg+xml"}[kind]
        if data is None:
            del output.data[key]
        else:
            output.data[key] = data
    return output


STDERR = nbformat.v4.new_output("stream", name="stderr", text="a warning\n")
ERROR = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])


def result(shown: str) -> NotebookNode:
    """What a last line leaves behind."""
    return nbformat.v4.new_output("execute_result", data={"text/plain": shown})


OPEN_ANSWER = "<details>\n<summary>Why</summary>\nBecause.\n</details>"
ONE_LINE_ANSWER = "<details><summary>Why</summary>\n\nBecause.\n\n</details>"
MATH_SUMMARY = "<details>\n<summary>Why $n$</summary>\n\nBecause.\n\n</details>"

MODULES = [  # as PyTorch prints them
    "Transformer(\n  (embedding): Embedding(64, 32)\n  (norm): RMSNorm((32,), eps=1e-05)\n)",
    "ModuleList(\n  (0-3): 4 x SiLU()\n)",
    "Linear(in_features=32, out_features=96, bias=False)",
    "Embedding(64, 32)",
    "RMSNorm((32,), eps=1e-05, elementwise_affine=True)",
]

PLANTED = [
    (cell_rules.run_in_order, set_count("count", 7)),
    (cell_rules.run_in_order, set_count("count", None)),
    (cell_rules.outputs_present, set_outputs("count")),
    (cell_rules.outputs_present, set_outputs("plot")),
    (cell_rules.outputs_present, set_source("stub-total", "rows")),
    (cell_rules.outputs_present, set_source("stub-total", "for i in [1]:\n    print(i)\nx = 1")),
    (cell_rules.no_stderr, set_outputs("count", STDERR)),
    (cell_rules.errors_only_where_announced, set_outputs("count", ERROR)),
    (cell_rules.errors_only_where_announced, set_metadata("count", tags=["raises-exception"])),
    (cell_rules.known_tags, set_metadata("count", tags=["nbval-skip"])),
    (cell_rules.known_tags, set_metadata("count", tags=["nbval-ignore-outputs"])),
    (cell_rules.known_tags, set_source("count", "# NBVAL_SKIP\nprint(1)")),
    (cell_rules.hidden_alike, set_metadata("plot", jupyter={})),
    (cell_rules.hidden_alike, set_metadata("plot", tags=[])),
    (cell_rules.hidden_alike, set_metadata("plot", cellView="")),
    (cell_rules.hidden_alike, set_source("plot", "plot()\nplt.show()")),
    (cell_rules.hidden_alike, set_metadata("proof", collapsed=False)),
    (cell_rules.hidden_alike, set_metadata("proof", jupyter={"source_hidden": True})),
    (cell_rules.hidden_alike, set_metadata("proof", tags=["evidence", "hide-input"])),
    (cell_rules.no_trailing_semicolon, set_source("plot", "plot();")),
    (cell_rules.no_clear_output, set_source("plot", "clear_output()\nplot()")),
    (cell_rules.no_machine_paths, set_outputs("count", stdout("read /home/ada/model\n"))),
    (cell_rules.no_machine_paths, set_source("count", 'print(open("/tmp/x"))')),
    (cell_rules.no_machine_paths, set_outputs("count", stdout(f"{notebooks.ROOT}/kvbook\n"))),
    (cell_rules.no_machine_paths, add_prose("See `.venv/lib/site-packages`.")),
    (cell_rules.no_addresses, set_outputs("count", result("<A at 0x7f00aabbccdd>"))),
    (cell_rules.no_addresses, set_outputs("count", stdout("<a.B object at 0x7f00aabbccdd>\n"))),
    *((cell_rules.no_addresses, set_outputs("count", result(module))) for module in MODULES),
    (cell_rules.no_addresses, set_outputs("count", stdout(f"model {MODULES[0]}\n"))),
    (cell_rules.first_cell, set_source(repository.FIRST_CELL_ID, "import kvbook")),
    (cell_rules.first_cell, drop_cell(repository.FIRST_CELL_ID)),
    (cell_rules.figures_described, set_metadata("plot", mystnb={})),
    (cell_rules.figures_described, set_metadata("plot", mystnb={"image": {"alt": ALT[:39]}})),
    (
        cell_rules.figures_described,
        set_metadata("plot", mystnb={"image": {"alt": f"../_images/{'a' * 40}.png"}}),
    ),
    (cell_rules.figures_comparable, set_outputs("plot", figure_with(svg=None))),
    (cell_rules.figures_comparable, set_outputs("plot", figure_with(png=None))),
    (
        cell_rules.figures_comparable,
        set_outputs("plot", figure_with(svg="<svg><dc:date>2026-01-01</dc:date></svg>")),
    ),
    (prose_rules.no_myst, add_prose("```{note}\nText\n```")),
    (prose_rules.no_myst, add_prose(":::{note}\nText\n:::")),
    (prose_rules.no_myst, add_prose("See {ref}`there`.")),
    (prose_rules.no_myst, add_prose("(label)=\n")),
    (prose_rules.no_myst, add_prose("$$\na = b\n$$ (equation)")),
    (prose_rules.plain_words, add_prose("This is **Just** a sum.")),
    (prose_rules.plain_words, add_prose("Simply add.")),
    (prose_rules.plain_words, add_prose("It is obviously so.")),
    (prose_rules.headings, add_prose("#### Too deep")),
    (prose_rules.headings, add_prose("# Second title")),
    (prose_rules.headings, set_source("title", "No title here.")),
    (prose_rules.sections_present, set_source("broken", "## Another")),
    (prose_rules.sections_present, set_source("reading", "## Another")),
    (prose_rules.claims_table, set_source("claims", "## Claims\n\nNone.")),
    (prose_rules.claims_table, set_source("claims", "## Claims\n\n| a | b |\n|---|---|\n")),
    (prose_rules.claims_table, set_source("claims", "## Claims\n\n| a |\n|---|\n| 1 |\n")),
    (prose_rules.questions, drop_code_questions),
    (prose_rules.questions, set_source("questions", "## Check your understanding\n\nNone.")),
    (prose_rules.details_render, add_prose(OPEN_ANSWER)),
    (prose_rules.details_render, add_prose(ONE_LINE_ANSWER)),
    (prose_rules.details_render, add_prose(MATH_SUMMARY)),
    (prose_rules.details_render, add_prose("<details>\n<summary>Why</summary>\n\nBecause.")),
    (prose_rules.links, add_prose("[there](02-missing.ipynb)")),
    (prose_rules.links, add_prose("[there](01-sample.ipynb#heading)")),
    (prose_rules.links, add_prose("[there](#heading)")),
    (prose_rules.links, add_prose("[there](#cell-id=absent)")),
    (prose_rules.links, add_prose("[there](/absolute.md)")),
    (prose_rules.links, add_prose("[there](http://example.org/)")),
    (prose_rules.links, add_prose("![picture](missing.png)")),
]


@pytest.mark.parametrize(
    ("rule", "spoil"), PLANTED, ids=[f"{i}-{rule.__name__}" for i, (rule, _) in enumerate(PLANTED)]
)
def test_rule_notices(rule: Rule, spoil: Callable[[NotebookNode], None]) -> None:
    notebook = sample()
    spoil(notebook)
    assert rule(chapter_of(notebook)) != []


def test_rule_notices_an_invalid_file() -> None:
    notebook = sample()
    good = chapter_of(notebook)
    del notebook.cells[0]["source"]
    assert cell_rules.valid_format(good) != []


def test_rule_notices_an_id_that_occurs_twice() -> None:
    notebook = sample()
    good = chapter_of(notebook)
    cell(notebook, "count").id = "bytes"
    assert cell_rules.unique_ids(good) == ["cell id 'bytes' occurs more than once"]


def test_rule_notices_a_file_that_is_not_in_normal_form() -> None:
    for spoiled in (sample(), sample(), sample()):
        text = notebooks.dumps(spoiled)
        assert cell_rules.normalized(Chapter(Path("a"), text, spoiled)) == []
        assert cell_rules.normalized(Chapter(Path("a"), text + "\n", spoiled)) != []
    spoiled.metadata["language_info"] = {"name": "python"}
    assert cell_rules.normalized(chapter_of(spoiled)) != []


def test_every_rule_is_broken_at_least_once() -> None:
    apart = {cell_rules.valid_format, cell_rules.unique_ids, cell_rules.normalized}
    assert {rule for rule, _ in PLANTED} | apart == set(rules.RULES)


def test_what_a_rule_allows() -> None:
    notebook = sample()
    add_prose(
        "`just` code, a [page](01-sample.ipynb), [https](https://example.org/#part), a "
        "set `{a}`, {braces}, and\n\n```\n<details> (label)= {ref}`x`\n```"
    )(notebook)
    cell(notebook, "stub-total").source = "if False:\n    print(1)\n_ = rows"
    cell(notebook, "stub-summed").source = "def shown():\n    print(1)\nplots.style()"
    for rule in (prose_rules.plain_words, prose_rules.no_myst, prose_rules.details_render):
        assert rule(chapter_of(notebook)) == []
    assert cell_rules.outputs_present(chapter_of(notebook)) == []


@pytest.mark.parametrize(
    "shown", ["Fraction(25, 2)", "(1, 2)\n(3): 4", "torch.Size([2, 3])", "Transformer (30 layers)"]
)
def test_values_may_be_shown(shown: str) -> None:
    notebook = sample()
    set_outputs("count", result(shown))(notebook)
    assert cell_rules.no_addresses(chapter_of(notebook)) == []


def test_a_link_to_a_page_that_exists_is_kept(tmp_path: Path) -> None:
    notebook = sample()
    add_prose("[there](intro.md)")(notebook)
    assert prose_rules.links(chapter_of(notebook, tmp_path)) != []
    (tmp_path / "intro.md").write_text("# Intro\n")
    assert prose_rules.links(chapter_of(notebook, tmp_path)) == []


def test_table_of_contents_notices_order_and_absence(tmp_path: Path) -> None:
    (tmp_path / "intro.md").write_text("# Intro\n")
    paths = [tmp_path / "01-a.ipynb", tmp_path / "02-b.ipynb"]
    name = tmp_path.name
    entries = [f"      - file: {name}/{page}\n" for page in ("01-a", "02-b", "intro")]
    head = f"root: {name}/intro\nparts:\n  - chapters:\n"
    assert rules.table_of_contents(paths, head + "".join(entries)) == []
    assert rules.table_of_contents(paths, head + "".join(reversed(entries))) != []
    assert rules.table_of_contents(paths, head + entries[0]) != []
    assert rules.table_of_contents(paths[:1], head + "".join(entries)) != []


# The tool ----------------------------------------------------------------------------------------


def test_an_empty_book_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no notebooks in"):
        notebooks.chapters(tmp_path)


def test_normal_form_drops_what_changes_by_itself() -> None:
    notebook = sample()
    expected = notebooks.dumps(notebook)
    notebook.metadata["language_info"] = {"name": "python", "version": "3.11.7"}
    notebook.metadata["widgets"] = {}
    count = cell(notebook, "count")
    count.metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
    count.metadata["scrolled"] = True
    count.outputs = [
        stdout("100 tokens: "),
        stdout("5,050 rows\nratio 50.5x\n"),
    ]
    assert notebooks.dumps(notebooks.normalize(notebook)) == expected
    assert expected.endswith("}\n")
    assert not expected.endswith("\n\n")
    assert json.loads(expected)["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }


def test_streams_merge_only_beside_each_other() -> None:
    notebook = sample()
    result = nbformat.v4.new_output("execute_result", data={"text/plain": "1"})
    set_outputs("count", stdout("a"), stdout("b"), result, stdout("c"))(notebook)
    outputs = cell(notebooks.normalize(notebook), "count").outputs
    assert [output.get("text") for output in outputs] == ["ab", None, "c"]


def test_an_error_keeps_its_message_and_loses_its_traceback() -> None:
    notebook = sample()
    error = nbformat.v4.new_output(
        "error", ename="ValueError", evalue="no room", traceback=["File /somewhere/x.py:3"]
    )
    set_outputs("count", error)(notebook)
    kept = cell(notebooks.normalize(notebook), "count").outputs[0]
    assert kept.traceback == ["ValueError: no room"]


def test_cell_ids_are_kept_or_derived_from_the_content() -> None:
    notebook = sample()
    kept = [c.id for c in notebook.cells]
    assert [c.id for c in notebooks.normalize(notebook).cells] == kept
    for index in (5, 7, 8):
        notebook.cells[index].id = "count"
    del notebook.cells[7]["id"]
    first = [c.id for c in notebooks.normalize(notebook).cells]
    assert first == [c.id for c in notebooks.normalize(notebook).cells]
    assert first[5] == "count"
    assert first[7].startswith("code-")
    assert first[8].startswith("markdown-")
    assert len(set(first)) == len(first)


def test_reading_and_writing_keeps_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "01-sample.ipynb"
    notebooks.write(sample(), path)
    before = path.read_bytes()
    notebooks.write(notebooks.normalize(notebooks.read(path)), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["01-sample.ipynb"]


def test_an_old_notebook_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.ipynb"
    path.write_text('{"nbformat": 3, "worksheets": []}')
    with pytest.raises(ValueError, match="format 3 is not supported"):
        notebooks.read(path)


def test_magics_become_pass_line_for_line() -> None:
    assert notebooks.python_of("if x:\n    %pip install y\n!ls\nz = 5 % 3") == (
        "if x:\n    pass\npass\nz = 5 % 3"
    )
    assert notebooks.python_of("%%bash\nls") == ""


def small(*sources: str) -> NotebookNode:
    cells = [
        nbformat.v4.new_code_cell(source, id=f"cell-{number}")
        for number, source in enumerate(sources, 1)
    ]
    return nbformat.v4.new_notebook(cells=cells)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The tool as the Makefile calls it, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tools.notebooks", *arguments],
        cwd=notebooks.ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def elsewhere(folder: Path) -> str:
    """A PYTHONPATH that leads to another kvbook; the tool's own folder comes with it."""
    other = folder / "other" / "kvbook"
    other.mkdir(parents=True, exist_ok=True)
    (other / "__init__.py").write_text("")
    return str(other.parent)


def test_a_changed_output_fails_where_the_notebook_stands_alone(tmp_path: Path) -> None:
    """Run in place, pass outside the repository, fail on one changed digit."""
    path = tmp_path / "01-small.ipynb"
    look = 'import os, importlib.util\nseen = os.environ["SEEN"]\n'
    look += 'found = os.path.realpath(importlib.util.find_spec("kvbook").origin)\n'
    look += f"mine = found.startswith({str(notebooks.ROOT)!r})\n"
    notebooks.write(small(f"{look}print(6 * 7)\nprint(os.listdir(), seen, mine)", "1 / 1"), path)
    done = run("execute", str(path), SEEN="yes", PYTHONPATH=elsewhere(tmp_path))
    assert done.returncode == 0, done.stderr
    notebook = notebooks.read(path)
    first, second = notebook.cells
    assert (first.execution_count, second.execution_count) == (1, 2)
    assert first.outputs[0].text == "42\n[] yes True\n"
    assert second.outputs[0].data == {"text/plain": "1.0"}
    assert path.read_text() == notebooks.dumps(notebooks.normalize(notebook))

    # Under the test the folder holds the notebook alone, and the environment is passed on.
    first.outputs[0].text = "42\n['01-small.ipynb'] yes True\n"
    notebooks.write(notebook, path)
    done = run("test", "--jobs", "0", str(path), SEEN="yes", PYTHONPATH=elsewhere(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "01-small" in done.stdout.splitlines()[-1]

    first.outputs[0].text = "43\n['01-small.ipynb'] yes True\n"
    notebooks.write(notebook, path)
    done = run("test", "--jobs", "0", str(path), SEEN="yes")
    assert done.returncode == 1
    assert "Cell outputs differ" in done.stdout


def test_a_failing_cell_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "01-failing.ipynb"
    notebooks.write(notebooks.normalize(small("print(1)", "raise ValueError('seen')")), path)
    before = path.read_bytes()
    done = run("execute", str(path))
    assert done.returncode == 1
    assert path.read_bytes() == before
    assert "01-failing.ipynb: FAILED, file left as it was, cell cell-2" in done.stderr
    assert "ValueError: seen" in done.stderr
