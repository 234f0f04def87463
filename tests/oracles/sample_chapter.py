"""A small chapter that keeps every rule, with its results in it. Tests spoil copies of it."""

import nbformat
from nbformat import NotebookNode

from tools import notebooks, repository

TITLE = """# Counting rows

A loop that feeds everything again projects 5,050 rows for 100 tokens; a cache projects $100$."""

STATEMENT = """## What it costs

One token takes 131,072 bytes, that is **128** KiB, or $131{,}072$ bytes.
At layer 0 nothing differs. The model float32 runs in Llama-3-8B too, see chapter 12.

1. Two passes differ by less than $10^{-12}$.
2. The ratio is $50.5\\times$, or 50.5×.

| tokens | rows |
|---|---|
| 100 | 5,050 |
"""

COUNT = """tokens = 100
rows = sum(range(1, tokens + 1))
print(f"{tokens} tokens: {rows:,} rows")
print(f"ratio {rows / tokens:.1f}x")"""

BYTES = """size = 131_072  # bytes per token
print(f"{size:,} bytes = {size // 1024} KiB")
assert abs(0.1 + 0.2 - 0.3) < 1e-12"""

FIGURE = """## Break it

A wrong loop forgets the last row."""

PLOT = "plot()\nplt.show()"

CLAIMS = """## Claims

| claim | check |
|---|---|
| the sum is exact | `assert rows == 5_050` |
"""

ANSWER = """{number}. Why?

<details>
<summary>Answer</summary>

Because of $n$ and `n`.

</details>"""

READING = """## Further reading

- Someone, 2017, pages 33 to 44, [a paper](https://example.org/1706.03762)
"""

SVG = "<svg xmlns='http://www.w3.org/2000/svg'></svg>\n"
ALT = "A line that rises from one row to a hundred rows."


def stdout(text: str) -> NotebookNode:
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def figure() -> NotebookNode:
    data = {"image/svg+xml": SVG, "image/png": "aGVsbG8=\n", "text/plain": "<Figure 640x480>"}
    return nbformat.v4.new_output("display_data", data=data)


def sample() -> NotebookNode:
    """A fresh copy of the chapter; the title stands in cell 0, the installing cell is cell 1."""
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    asked = "## Check your understanding\n\n" + "\n\n".join(
        ANSWER.format(number=number) for number in (1, 2, 3, 4, 5)
    )
    cells = [
        text(TITLE, id="title"),
        code(repository.first_cell(""), id=repository.FIRST_CELL_ID),
        code(COUNT, id="count", outputs=[stdout("100 tokens: 5,050 rows\nratio 50.5x\n")]),
        text(STATEMENT, id="statement"),
        code(BYTES, id="bytes", outputs=[stdout("131,072 bytes = 128 KiB\n")]),
        text(FIGURE, id="broken"),
        code(PLOT, id="plot", outputs=[figure()]),
        text(CLAIMS, id="claims"),
        text(asked, id="questions"),
        code("assert rows == 5_050", id="check-one"),
        code("assert tokens < rows", id="check-two"),
        text(READING, id="reading"),
    ]
    cells[6].metadata = nbformat.from_dict(
        {
            "tags": ["hide-input"],
            "jupyter": {"source_hidden": True},
            "mystnb": {"image": {"alt": ALT}},
        }
    )
    for count, cell in enumerate((c for c in cells if c.cell_type == "code"), 1):
        cell.execution_count = count
    return notebooks.normalize(nbformat.v4.new_notebook(cells=cells))
