"""Changes to the HTML that Jupyter Book writes: local KaTeX, code toggles named, cells linked.

Knows: Sphinx's nodes for math, links and code cells, and where a notebook keeps its cell ids.
Does not know: kvbook, the chapters, the repository's address.
"""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode, depart_HideCellInput, visit_HideCellInput
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.math import get_node_equation_number

CELL_LINK = "cell-id="
MATH_CLASSES = "math notranslate nohighlight"


def is_math(node: nodes.Node) -> bool:
    return isinstance(node, (nodes.math, nodes.math_block))


def visit_inline_math(translator: Any, node: nodes.math) -> None:
    """Write `$x$` as <span class="math">x</span>, which render-math.js turns into KaTeX's HTML."""
    translator.body.append(translator.starttag(node, "span", "", CLASS=MATH_CLASSES))
    translator.body.append(translator.encode(node.astext()) + "</span>")
    raise nodes.SkipNode


def visit_display_math(translator: Any, node: nodes.math_block) -> None:
    """Write `$$x$$` as <div class="math">x</div>; a labeled equation shows its number after it.

    The box can scroll, so it must be reachable by keyboard: tabindex 0.
    """
    translator.body.append(translator.starttag(node, "div", "", CLASS=MATH_CLASSES, tabindex="0"))
    translator.body.append(translator.encode(node.astext()) + "</div>\n")
    if node["number"]:
        number = get_node_equation_number(translator, node)
        translator.body.append(f'<p class="eqno">({number})</p>\n')
    raise nodes.SkipNode


def visit_code_toggle(translator: Any, node: HideCodeCellNode) -> None:
    """As myst-nb writes it, but named by its visible text alone.

    The fixed label "Toggle hidden content" contradicts the text that is shown.
    """
    start = len(translator.body)
    visit_HideCellInput(translator, node)
    written = "".join(translator.body[start:])
    translator.body[start:] = [written.replace(' aria-label="Toggle hidden content"', "")]


class LinkCells(SphinxTransform):
    """Links `#cell-id=ID` lead to the code cell of that id, as they do in JupyterLab.

    Runs before MyST looks for the targets of links within a page.
    """

    default_priority = 800

    def apply(self, **kwargs: Any) -> None:
        source = Path(self.env.doc2path(self.env.docname))
        if source.suffix != ".ipynb":
            return
        cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
        known = {CELL_LINK + cell["id"] for cell in cells if cell["cell_type"] == "code"}
        for node in self.document.findall(nodes.container):
            if node.get("nb_element") == "cell_code":
                cell = cells[node["cell_index"]]
                node["ids"].append(CELL_LINK + cell["id"])
        for link in self.document.findall(nodes.reference):
            target = link.get("refuri", "").removeprefix("#")
            if target in known and link.get("id_link"):
                del link["refuri"], link["id_link"]
                link["refid"] = target


def load_katex_where_needed(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Add KaTeX to the pages that hold math, and to no other."""
    if doctree is None or not any(doctree.findall(is_math)):
        return
    app.add_css_file("katex/katex.min.css")
    app.add_js_file("katex/katex.min.js", loading_method="defer")
    app.add_js_file("render-math.js", loading_method="defer")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the changes; in the list of extensions, `book_html` stands after `myst_nb`."""
    app.add_html_math_renderer("katex", (visit_inline_math, None), (visit_display_math, None))
    app.config.html_math_renderer = "katex"
    app.add_node(HideCodeCellNode, override=True, html=(visit_code_toggle, depart_HideCellInput))
    app.add_transform(LinkCells)
    app.connect("html-page-context", load_katex_where_needed)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
