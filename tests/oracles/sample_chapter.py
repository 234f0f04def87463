"""A small chapter that keeps every rule, with its results in it. Tests spoil copies of it."""

import nbformat
from nbformat import NotebookNode

from tools import notebooks, repository

TITLE = """# Counting rows

*About 2 minutes.*

A loop that feeds everything again projects **5,050** rows for 100 tokens; a cache $100$."""

SHORT = """## In short

1. A
2. B
3. C
4. D
5. E
"""

BY_HAND = """## In two minutes

By hand: two of them, and the rest."""

BUILD = "## Build it\n\nThe loop counts."

STATEMENT = """## What it costs

One token takes 131,072 bytes, that is **128** KiB, or $131{,}072$ bytes.
At layer 0 nothing differs. The model float32 runs in Llama-3-8B too, see chapter 12.

1. Two passes differ by less than $10^{-12}$.
2. The ratio is $50.5\\times$, or 50.5×.

| tokens | rows |
|---|---|
| 100 | 5,050 |

> **Keep.** One row for each token.

> **Keep.** The sum is quadratic.
"""

COUNT = """tokens = 100
rows = sum(range(1, tokens + 1))
print(f"{tokens} tokens: {rows:,} rows")
print(f"ratio {rows / tokens:.1f}x")"""

BYTES = """size = 131_072  # bytes per token
print(f"{size:,} bytes = {size // 1024} KiB")
assert abs(0.1 + 0.2 - 0.3) < 1e-12"""

PROOF = "## On a real model\n\nFor 2 passes the sum was compared."

KEEP = "## Keep\n\n> **Keep.** Count the rows."

FIGURE = """## Break it

A wrong loop forgets the last row."""

PLOT = "plot()\nplt.show()"

CLAIMS = """## Claims

| claim | check |
|---|---|
| the sum is exact | [`assert rows == 5_050`](#cell-id=count) |
"""

ANSWER = """{number}. Why?

<details>
<summary>Answer</summary>

Because of $n$ and `n`.

</details>"""

STUB = """def {name}(n):
    ..."""

CHECK = """def check_{name}(answer):
    given = answer(3)
    if given != 6:
        return f"{name}(3) gave {{given}}, expected 6; is the last one counted?"
    return "Right."


print(check_{name}({name}))"""

SOLUTION = """def {name}(n):
    return n * (n + 1) // 2


print(check_{name}({name}))"""

REJECTS = """rejects = {{
    "the last one forgotten": lambda n: n * (n - 1) // 2,
    "no half": lambda n: n * (n + 1),
    "one row each": lambda n: n,
}}
accepts = {{"a loop": lambda n: sum(range(n + 1))}}"""

LENS = "## The architect's lens\n\nWhy?"
ENGINES = "## Today's engines\n\nNone."

READING = """## Further reading

- Someone, 2017, pages 33 to 44, [a paper](https://example.org/1706.03762)
"""

SVG = "<svg xmlns='http://www.w3.org/2000/svg'></svg>\n"
ALT = "A line that rises from one row to a hundred rows."


def stdout(text: str) -> NotebookNode:
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def figure() -> NotebookNode:
    data = {"image/svg+xml": SVG, "image/png": "aGVsbG8=\n", "text/plain": "<Figure 640x480>"}
    output = nbformat.v4.new_output("display_data", data=data)
    output.metadata["seal"] = notebooks.seal(output)
    return output


def exercise(name: str) -> list[NotebookNode]:
    """The four cells of an exercise that asks for a function of that name."""
    code = nbformat.v4.new_code_cell
    complaint = f"{name}(3) gave None, expected 6; is the last one counted?\n"
    cells = [
        code(STUB.format(name=name), id=f"stub-{name}"),
        code(CHECK.format(name=name), id=f"check-{name}", outputs=[stdout(complaint)]),
        code(SOLUTION.format(name=name), id=f"solution-{name}", outputs=[stdout("Right.\n")]),
        code(REJECTS.format(), id=f"rejects-{name}"),
    ]
    for cell, tag in zip(cells[1:], ("check", "solution", "evidence"), strict=True):
        cell.metadata = nbformat.from_dict({"tags": [tag]})
    return cells


def sample() -> NotebookNode:
    """A fresh copy of the chapter; the title stands in cell 0, the installing cell is cell 1."""
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    asked = "## Check your understanding\n\n" + "\n\n".join(
        ANSWER.format(number=number) for number in (1, 2, 3, 4, 5)
    )
    cells = [
        text(TITLE, id="title"),
        code(repository.first_cell(""), id=repository.FIRST_CELL_ID),
        text(SHORT, id="short"),
        text(BY_HAND, id="by-hand"),
        text(BUILD, id="build"),
        code(COUNT, id="count", outputs=[stdout("100 tokens: 5,050 rows\nratio 50.5x\n")]),
        text(STATEMENT, id="statement"),
        code(BYTES, id="bytes", outputs=[stdout("131,072 bytes = 128 KiB\n")]),
        text(PROOF, id="real"),
        code("print(rows)\nprint(tokens)", id="proof", outputs=[stdout("5050\n100\n")]),
        text(KEEP, id="keep"),
        text(FIGURE, id="broken"),
        code(PLOT, id="plot", outputs=[figure()]),
        text(CLAIMS, id="claims"),
        text(asked, id="questions"),
        *exercise("total"),
        *exercise("summed"),
        text(LENS, id="lens"),
        text(ENGINES, id="engines"),
        text(READING, id="reading"),
    ]
    by_id = {cell.id: cell for cell in cells}
    by_id[repository.FIRST_CELL_ID].metadata["tags"] = ["setup"]
    by_id["proof"].metadata["tags"] = ["evidence"]
    by_id["plot"].metadata = nbformat.from_dict(
        {"tags": ["plot"], "mystnb": {"image": {"alt": ALT}}}
    )
    for count, cell in enumerate((c for c in cells if c.cell_type == "code"), 1):
        cell.execution_count = count
    return notebooks.normalize(nbformat.v4.new_notebook(cells=cells))
