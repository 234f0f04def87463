"""The built HTML keeps its promises: the book's pages, and a specimen that holds it all.

Each rule is also shown to fail on a page that breaks it.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tools import build_html, specimen
from tools import html_checks as checks

ROOT = build_html.ROOT
KATEX = ROOT / "book" / "_static" / "katex"

# All 20 math fonts are counted, of which a page loads about 5: a page without a chapter comes to
# 1.6 million. A chapter adds its code and its figures. As it comes, the theme is heavier.
MAX_WEIGHT = 2_200_000


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which importing torch or kvbook ends the build."""
    folder = tmp_path_factory.mktemp("without_torch")
    for name in ("torch", "kvbook"):
        text = f"raise SystemExit('building the HTML imported {name}')\n"
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="session")
def book_site(without_torch: dict[str, str]) -> Path:
    """The folder of the book's HTML."""
    return build_html.build(env=without_torch).parent


@pytest.fixture(scope="session")
def specimen_site(tmp_path_factory: pytest.TempPathFactory, without_torch: dict[str, str]) -> Path:
    """The folder of the specimen's HTML."""
    folder = tmp_path_factory.mktemp("html") / "specimen"
    specimen.write(folder)
    return build_html.build(folder, env=without_torch).parent


@pytest.fixture(params=["book_site", "specimen_site"])
def site(request: pytest.FixtureRequest) -> Path:
    """Either of the two."""
    return request.getfixturevalue(request.param)


def faults(site: Path, check: Callable[[checks.Page], list[str]]) -> list[str]:
    pages = checks.pages(site)
    assert len(pages) >= 3
    return [f"{page.path.relative_to(site)}: {fault}" for page in pages for fault in check(page)]


# What holds for each page


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_each_page_keeps_the_rule(site: Path, check: Callable[[checks.Page], list[str]]) -> None:
    assert faults(site, check) == []


def test_no_page_is_heavier_than_the_bound(site: Path) -> None:
    weights = {page.path.name: checks.weight(page) for page in checks.pages(site)}
    assert {name: size for name, size in weights.items() if size > MAX_WEIGHT} == {}


def test_no_page_names_the_machine_that_built_it(site: Path) -> None:
    paths = [str(site.parent.parent), str(ROOT), f"{Path.home()}/", sys.prefix]
    assert faults(site, lambda page: checks.machine_paths(page, paths)) == []


def test_some_page_holds_math_and_some_page_holds_none(site: Path) -> None:
    assert {checks.has_math(page) for page in checks.pages(site)} == {True, False}


def test_the_first_page_leads_to_the_introduction(site: Path) -> None:
    first = checks.read(site / "index.html", site)
    refresh = first.soup.select_one("meta[http-equiv=refresh]")
    assert refresh is not None
    assert refresh["content"] == "0; url=book/intro.html"
    assert (site / "book" / "intro.html").is_file()
    assert checks.language_and_title(first) + checks.broken_links(first) == []


def test_a_figure_keeps_its_words_and_a_toggle_its_visible_name(specimen_site: Path) -> None:
    page = checks.read(specimen_site / "book" / "01-everything.html", specimen_site)
    figures = page.soup.select(".cell_output img")
    assert [image["alt"] for image in figures] == [specimen.ALT, specimen.ALT]
    toggles = page.soup.select("details.hide > summary")
    assert [toggle.get("aria-label") for toggle in toggles] == [None, None]
    assert [toggle.find("p").get_text() for toggle in toggles] == ["Plotting code"] * 2


def test_a_table_that_a_cell_prints_is_a_table(specimen_site: Path) -> None:
    page = checks.read(specimen_site / "book" / "01-everything.html", specimen_site)
    (table,) = page.soup.select(".cell_output table")
    assert [cell.get_text() for cell in table.find_all("td")] == ["keys", "1,024"]


def test_a_link_to_a_cell_leads_to_its_container(specimen_site: Path) -> None:
    page = checks.read(specimen_site / "book" / "01-everything.html", specimen_site)
    assert page.soup.find("a", href="#cell-id=figure-svg").get_text() == "in this cell"
    target = page.soup.find(id="cell-id=figure-svg")
    assert "cell" in target["class"]
    assert target.find("img")


def test_formulas_reach_katex_as_they_were_written(specimen_site: Path) -> None:
    page = checks.read(specimen_site / "book" / "intro.html", specimen_site)
    assert [span.get_text() for span in page.soup.select("span.math")] == ["E = mc^2"]
    assert [box.get_text().strip() for box in page.soup.select("div.math")] == ["a = b"]
    assert [number.get_text() for number in page.soup.select("p.eqno")] == ["(1)"]


# Launch buttons


def test_launch_buttons_appear_only_with_a_repository(site: Path) -> None:
    config = yaml.safe_load((site.parent.parent / "_config.yml").read_text(encoding="utf-8"))
    links = faults(site, checks.launch_links)
    if "repository" in config:
        owner_and_name = "/".join(config["repository"]["url"].rstrip("/").split("/")[-2:])
        assert links
        assert [link for link in links if f"/{owner_and_name}/" not in link] == []
    else:
        assert links + faults(site, checks.repository_buttons) == []


def test_launch_buttons_lead_to_the_repository_that_is_set(tmp_path: Path) -> None:
    folder = tmp_path / "offered"
    specimen.write(folder)
    specimen.set_repository(folder)
    site = build_html.build(folder).parent
    chapter = checks.read(site / "book" / "01-everything.html", site)
    assert checks.launch_links(chapter) == [f"{specimen.COLAB}01-everything.ipynb"]
    for check in checks.CHECKS:
        assert faults(site, check) == []


# The build


def test_a_warning_fails_the_build_the_second_time_too(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    specimen.write(folder)
    (folder / "book" / "02-no-math.md").write_text(
        "# Broken\n\n[x](absent.ipynb)\n", encoding="utf-8"
    )
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            build_html.build(folder)


def test_without_jupyter_book_the_build_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    kept = tmp_path / "_build" / "html" / "index.html"
    kept.parent.mkdir(parents=True)
    kept.write_text("kept", encoding="utf-8")
    with pytest.raises(ValueError, match=r"no jupyter-book beside .*make book"):
        build_html.build(tmp_path)
    assert kept.read_text(encoding="utf-8") == "kept"


def test_katex_is_the_release_that_the_notice_names() -> None:
    sums = {name: hashlib.sha256((KATEX / name).read_bytes()).hexdigest() for name in KATEX_SUMS}
    assert sums == KATEX_SUMS
    assert "MIT License" in (KATEX / "LICENSE").read_text(encoding="utf-8")
    fonts = {path.name for path in (KATEX / "fonts").iterdir()}
    css = (KATEX / "katex.min.css").read_text(encoding="utf-8")
    assert len(fonts) == 20
    assert {name for name in fonts if f"fonts/{name}" not in css} == set()


KATEX_SUMS = {
    "katex.min.css": "00e0b094171b07f58422075f469b4feac2b2f7bce1aeec943c08da4d697f4dcf",
    "katex.min.js": "fa140498b8cfc8302cbe5e7cb1bdbc1f952bc38b3fa258ede09e73edbf9a74bc",
}


# The rules bite: a good page has no fault, and each rule finds the one page that breaks it

HEAD = '<title>T</title><link rel="stylesheet" href="good.css">'
KATEX_HEAD = (
    '<link rel="stylesheet" href="katex.min.css"><script src="katex.min.js"></script>'
    '<script src="render-math.js"></script>'
)
BODY = (
    '<button class="search-button-field">Search</button><dialog><input type="search"></dialog>'
    '<div class="onlyprint"><h1>T</h1></div><h1 id="top">T</h1><a href="#top">top</a>'
    '<a href="https://example.org">elsewhere</a><code>$HOME and $PATH</code>'
    '<img src="a.png" alt="Two lines that cross.">'
)
MATH = '<span class="math">x</span>'


def plant(
    folder: Path, head: str = HEAD, body: str = BODY, lang: str = ' lang="en"'
) -> checks.Page:
    """A small page in a site of its own."""
    (folder / "good.css").write_text("".join(checks.NEEDED_CSS), encoding="utf-8")
    for name in ("a.png", "katex.min.css", "katex.min.js", "render-math.js"):
        (folder / name).write_bytes(b"0123456789")
    page = folder / "page.html"
    page.write_text(f"<html{lang}><head>{head}</head><body>{body}</body></html>", encoding="utf-8")
    return checks.read(page, folder)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_a_good_page_has_no_fault(
    tmp_path: Path, check: Callable[[checks.Page], list[str]]
) -> None:
    assert check(plant(tmp_path)) == []
    assert check(plant(tmp_path, head=HEAD + KATEX_HEAD, body=BODY + MATH)) == []


@pytest.mark.parametrize(
    ("check", "head", "body"),
    [
        (checks.external_requests, '<script src="https://cdn.example/x.js"></script>', ""),
        (checks.external_requests, '<script src="//cdn.example/x.js"></script>', ""),
        (checks.external_requests, '<link rel="stylesheet" href="http://cdn.example/x.css">', ""),
        (checks.external_requests, '<link rel="preconnect" href="https://cdn.example">', ""),
        (checks.external_requests, "<style>@import 'https://cdn.example/x.css';</style>", ""),
        (checks.external_requests, "<style>a{src:url(https://cdn.example/f.woff2)}</style>", ""),
        (checks.external_requests, "", '<img src="https://cdn.example/x.png" alt="A line.">'),
        (checks.external_requests, "", '<img srcset="a.png 1x, https://cdn.example/x.png 2x">'),
        (checks.external_requests, "", '<iframe src="https://cdn.example"></iframe>'),
        (checks.external_requests, "", '<p style="background:url(https://cdn.example/x.png)">'),
        (checks.search_boxes, "", '<input type="search">'),
        (checks.search_boxes, "", '<button class="search-button-field">Search</button>'),
        (checks.foreign_machinery, "", '<script src="thebe.js"></script>'),
        (checks.foreign_machinery, "", "<script>window.MathJax = {}</script>"),
        (checks.foreign_machinery, "", '<script src="fontawesome.js?digest=1"></script>'),
        (checks.katex_where_needed, "", MATH),
        (checks.katex_where_needed, KATEX_HEAD, ""),
        (checks.katex_where_needed, KATEX_HEAD + KATEX_HEAD, MATH),
        (checks.raw_math, "", "<summary>Why $\\sqrt{D}$?</summary>"),
        (checks.raw_math, "", "<p>\\begin{align} x &= y \\end{align}</p>"),
        (checks.image_texts, "", '<img src="a.png">'),
        (checks.image_texts, "", '<img src="a.png" alt="../_images/3087e7.svg">'),
        (checks.image_texts, "", '<img src="a.png" alt="a.png">'),
        (checks.broken_links, "", '<a href="absent.html">x</a>'),
        (checks.broken_links, "", '<a href="#absent">x</a>'),
        (checks.broken_links, "", '<a href="page.html#absent">x</a>'),
        (checks.broken_links, "", '<a href="../page.html">x</a>'),
        (checks.broken_links, "", '<script src="absent.js"></script>'),
        (checks.language_and_title, "", "<h1>Another</h1>"),
    ],
)
def test_the_rule_finds_the_fault(
    tmp_path: Path, check: Callable[[checks.Page], list[str]], head: str, body: str
) -> None:
    page = plant(tmp_path, head=HEAD + head, body=BODY + body)
    assert len(check(page)) >= 1


def test_the_rule_finds_what_is_missing(tmp_path: Path) -> None:
    assert checks.search_boxes(plant(tmp_path, body="<h1>T</h1>")) == [
        "0 search boxes, allowed is 1",
        "0 search fields that open the dialog, allowed is 1",
    ]
    assert len(checks.missing_css(plant(tmp_path, head="<title>T</title>"))) == 4
    assert checks.language_and_title(plant(tmp_path, lang="")) == ["<html> has no lang='en'"]
    assert checks.language_and_title(plant(tmp_path, head="")) == ["no <title>"]
    assert checks.language_and_title(plant(tmp_path, body="")) == [
        "0 headings of the first level, wanted 1"
    ]


def test_a_style_sheet_that_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    page = plant(tmp_path)
    (tmp_path / "good.css").write_text(
        "@import url('https://cdn.example/x.css');", encoding="utf-8"
    )
    assert checks.external_requests(page) == ["loads https://cdn.example/x.css"]


def test_launch_and_repository_buttons_are_found(tmp_path: Path) -> None:
    link = "https://colab.research.google.com/github/someone/kv-book/blob/main/a.ipynb"
    group = f'<div class="dropdown-launch-buttons"><a href="{link}">Colab</a></div>'
    page = plant(tmp_path, body=BODY + group + "<p>github.com/executablebooks/jupyter-book</p>")
    assert checks.launch_links(page) == [link]
    assert checks.repository_buttons(page) == [
        "a button group dropdown-launch-buttons",
        "names executablebooks",
    ]
    assert checks.launch_links(plant(tmp_path)) + checks.repository_buttons(plant(tmp_path)) == []


def test_weight_counts_each_loaded_file_once(tmp_path: Path) -> None:
    twice = '<script src="katex.min.js"></script><script src="katex.min.js?v=1"></script>'
    page = plant(tmp_path, head=twice, body='<img src="a.png" alt="A line.">')
    assert checks.weight(page) == len(page.text) + 10 + 10


def test_weight_counts_the_fonts_of_a_style_sheet(tmp_path: Path) -> None:
    page = plant(tmp_path, body="")
    css = "a{src:url(f.woff2) format('woff2'),url(f.ttf) format('truetype')}"
    (tmp_path / "good.css").write_text(css, encoding="utf-8")
    (tmp_path / "f.woff2").write_bytes(bytes(1000))
    (tmp_path / "f.ttf").write_bytes(bytes(5000))
    assert checks.weight(page) == len(page.text) + len(css) + 1000


def test_a_path_of_the_machine_is_found(tmp_path: Path) -> None:
    page = plant(tmp_path, body="<p>/home/someone/book/01.ipynb</p>")
    assert checks.machine_paths(page, ["/home/someone"]) == ["holds the path /home/someone"]
    assert checks.machine_paths(page, ["/opt/python"]) == []
