"""Write a specimen book: the real configuration around pages that hold each thing a page may hold.

Knows: the book's configuration files and the kinds of content (math, tables, code, figures).
Does not know: the chapters; it shows whether the configuration bears them before they are written.
"""

import base64
import re
import shutil
import struct
import zlib
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import folding

ROOT = Path(__file__).resolve().parent.parent
STYLE_FOLDERS = ("_ext", "_extra", "_static", "_templates")
REPOSITORY = """# repository: begin
repository:
  url: https://github.com/someone/kv-book
  path_to_book: ""
  branch: main
launch_buttons:
  notebook_interface: jupyterlab
  colab_url: https://colab.research.google.com
# repository: end
"""
COLAB = "https://colab.research.google.com/github/someone/kv-book/blob/main/book/"
ALT = "A line that falls from the upper left to the lower right: seconds over tokens."

TABLE = "| part | size (KiB) |\n| --- | ---: |\n| keys | 1,024 |"

INTRO = """# A specimen

A page with math, $E = mc^2$, and a link to [the chapter](01-everything.ipynb).

:::{note}
Plain pages may use directives.
:::

$$
a = b
$$ (labeled)

The labeled equation is {eq}`labeled`.
"""

PLAIN = """# A page without math

Nothing here needs KaTeX. Back to [everything](01-everything.ipynb).
"""

MARKDOWN = r"""# Everything at once

Inline math that is wider than a phone,
$\mathrm{bytes} = 2 \cdot B \cdot L \cdot n \cdot H_{kv} \cdot D \cdot b
= 2 \cdot 16 \cdot 32 \cdot 4{,}096 \cdot 8 \cdot 128 \cdot 2$,
short math $\mathrm{softmax}(QK^\top / \sqrt{D})$ and a long inline word:
`kvbook.cache.placement.contiguous.ContiguousPlacement.reserve_and_assign_positions`.

## A wide formula and a wide table

$$
\mathrm{bytes} = 2 \cdot B \cdot L \cdot n \cdot H_{kv} \cdot D \cdot b
= 2 \cdot 16 \cdot 32 \cdot 4{,}096 \cdot 8 \cdot 128 \cdot 2 = 8{,}589{,}934{,}592
$$

$$
\begin{aligned}
q_i &= x_i W_Q \\
k_j &= x_j W_K
\end{aligned}
$$

| model | layers | query heads | key/value heads | head width | bytes per token | at 131,072 |
|---|---:|---:|---:|---:|---:|---:|
| a-model-with-a-very-long-name-70b | 80 | 64 | 8 | 128 | 327,680 | 42,949,672,960 |
| $\sqrt{D}$ in a cell | 30 | 9 | 3 | 64 | 23,040 | 3,019,898,880 |

## Check your understanding

The figure is drawn [in this cell](#cell-id=figure-svg).

1. What does a cache hold?

<details>
<summary>Answer</summary>

The keys and values, $K$ and $V$, of each layer:

```python
cache = {"layer 0": ("keys", "values"), "layer 1": ("keys", "values"), "layer 2": ("keys", "v")}
```

</details>
"""

LONG_LINE = "a long line of output: " + " ".join(f"{n:,}" for n in range(1000, 1040))

SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="640" height="320" viewBox="0 0 640 320">
<rect width="640" height="320" fill="white"/>
<path d="M60 20V270H620" fill="none" stroke="black" stroke-width="2"/>
<path d="M60 40L620 250" fill="none" stroke="#0072b2" stroke-width="4"/>
<path d="M60 200L620 200" fill="none" stroke="#d55e00" stroke-width="4"/>
<text x="340" y="305" font-size="20" text-anchor="middle">tokens</text>
<text x="300" y="110" font-size="20" fill="#0072b2">seconds</text>
</svg>
"""


def _white_png(width: int, height: int) -> str:
    """A white gray-scale PNG in base64, written from the format's own chunks."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = (b"\x00" + b"\xff" * width) * height
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode("ascii")


def _figure(mime: str, data: str) -> nbformat.NotebookNode:
    """A hidden plotting cell with one figure of that MIME type."""
    name = f"figure-{mime.removeprefix('image/')[:3]}"
    cell = new_code_cell("plot(seconds, tokens)", id=name, execution_count=2)
    cell.metadata.update(tags=["plot"], mystnb={"image": {"alt": ALT}})
    cell.outputs = [new_output("display_data", data={mime: data})]
    folding.apply(cell)
    return cell


def _chapter() -> nbformat.NotebookNode:
    code = new_code_cell(f"print({LONG_LINE!r})", execution_count=1)
    code.outputs = [new_output("stream", name="stdout", text=LONG_LINE + "\n")]
    figures = [_figure("image/svg+xml", SVG), _figure("image/png", _white_png(640, 320))]
    table = new_code_cell("plots.table(head, rows)", execution_count=3)
    table.outputs = [new_output("display_data", data={"text/markdown": TABLE})]
    cells = [new_markdown_cell(MARKDOWN), code, *figures, table]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def write(folder: Path, root: Path = ROOT) -> None:
    """Write the specimen book into `folder`, with the configuration of the book in `root`."""
    book = folder / "book"
    book.mkdir(parents=True)
    shutil.copy(root / "_config.yml", folder)
    for name in STYLE_FOLDERS:
        shutil.copytree(root / "book" / name, book / name)
    chapters = ["book/01-everything", "book/02-no-math"]
    listed = "\n".join(f"  - file: {chapter}" for chapter in chapters)
    (folder / "_toc.yml").write_text(
        f"format: jb-book\nroot: book/intro\nchapters:\n{listed}\n", encoding="utf-8"
    )
    (book / "intro.md").write_text(INTRO, encoding="utf-8")
    (book / "02-no-math.md").write_text(PLAIN, encoding="utf-8")
    nbformat.write(_chapter(), book / "01-everything.ipynb")


def set_repository(folder: Path) -> None:
    """Give the specimen in `folder` the public repository of REPOSITORY."""
    path = folder / "_config.yml"
    config = path.read_text(encoding="utf-8")
    block = re.compile(r"# repository: begin\n.*?# repository: end\n", re.DOTALL)
    path.write_text(block.sub(lambda _: REPOSITORY, config, count=1), encoding="utf-8")
