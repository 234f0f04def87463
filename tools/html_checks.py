"""Rules that each built page of the book keeps, as functions from a page to its list of faults.

Knows: HTML and CSS as files on disk, and what the book promises its readers about them.
Does not know: how the pages were built, or what a browser does with them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup
from bs4.element import Tag

KATEX = ("katex.min.css", "katex.min.js", "render-math.js")
OFFERS = ("colab.research.google.com", "mybinder.org", "/hub/user-redirect/", "deepnote.com")
LOADED_LINKS = {"stylesheet", "preload", "modulepreload", "icon", "preconnect", "dns-prefetch"}
SOURCES = {"script", "img", "source", "iframe", "embed", "video", "audio", "track", "input"}
CSS_URL = re.compile(r"url\(\s*['\"]?(?P<a>[^'\")]+)|@import\s+['\"](?P<b>[^'\"]+)")
RAW_MATH = re.compile(r"\$[^\s$](?:[^$\n]*[^\s$])?\$|\\begin\{|\\\(|\\\[")
FILE_NAME = re.compile(r"\.(png|svg|jpe?g|gif|webp)$|^_images|^file:", re.IGNORECASE)
IMAGE_SUFFIXES = {".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp"}

# Written without spaces, as `_squeeze` leaves them.
NEEDED_CSS = (
    'html[data-theme="dark"].bd-content.cell_outputimg:not(.only-dark,.dark-light)'
    "{background:transparent;filter:invert(0.93)hue-rotate(180deg);}",
    "code.literal,code.literal.pre{white-space:normal;overflow-wrap:anywhere;}",
    "div.math{display:block;overflow-x:auto;overflow-y:hidden;}",
    "span.math{display:inline;overflow:visible;}",
)


@dataclass(frozen=True)
class Page:
    """One HTML file of the folder `site`."""

    path: Path
    site: Path
    text: str
    soup: BeautifulSoup

    def local(self, reference: str) -> Path:
        """The file that a relative reference on this page names; the query is ignored."""
        path = unquote(urlsplit(reference).path)
        return (self.path.parent / path).resolve() if path else self.path.resolve()


def read(path: Path, site: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    return Page(path, site, text, BeautifulSoup(text, "html.parser"))


def pages(site: Path) -> list[Page]:
    """All pages but the theme's own files and the first page, which leads to the introduction."""
    paths = sorted(site.rglob("*.html"))
    kept = [p for p in paths if p.relative_to(site).parts[0] not in ("_static", "index.html")]
    return [read(path, site) for path in kept]


def has_math(page: Page) -> bool:
    return bool(page.soup.select(".math"))


def _is_external(reference: str) -> bool:
    return bool(re.match(r"(https?:)?//", reference.strip(), re.IGNORECASE))


def _loaded(page: Page) -> Iterator[str]:
    """Each reference that a browser follows without being asked."""
    for tag in page.soup.find_all(SOURCES):
        if tag.get("src"):
            yield str(tag["src"])
        for choice in str(tag.get("srcset", "")).split(","):
            if choice.strip():
                yield choice.split()[0]
    for tag in page.soup.find_all("object"):
        yield str(tag.get("data", ""))
    for tag in page.soup.find_all("link"):
        if LOADED_LINKS & set(tag.get("rel") or []):
            yield str(tag.get("href", ""))


def _style_sheets(page: Page) -> list[Path]:
    links = page.soup.select('link[rel~="stylesheet"]')
    references = [str(link["href"]) for link in links if not _is_external(str(link["href"]))]
    return [page.local(reference) for reference in references]


def _css_references(css: str) -> list[str]:
    return [match["a"] or match["b"] for match in CSS_URL.finditer(css)]


def external_requests(page: Page) -> list[str]:
    """Nothing is fetched from another host: no script, style, image, font, frame or hint."""
    found = [reference for reference in _loaded(page) if _is_external(reference)]
    own_css = [tag.get_text() for tag in page.soup.find_all("style")]
    own_css += [str(tag["style"]) for tag in page.soup.find_all(style=True)]
    sheets = [sheet.read_text(encoding="utf-8") for sheet in _style_sheets(page) if sheet.exists()]
    for css in own_css + sheets:
        found += [reference for reference in _css_references(css) if _is_external(reference)]
    return [f"loads {reference}" for reference in found]


def search_boxes(page: Page) -> list[str]:
    """One search box, in the dialog; the search page shows its own beside it."""
    boxes = len(page.soup.select("input[type=search]"))
    fields = len(page.soup.select("button.search-button-field"))
    allowed = 2 if page.path.name == "search.html" else 1
    faults = []
    if boxes != allowed:
        faults.append(f"{boxes} search boxes, allowed is {allowed}")
    if fields != 1:
        faults.append(f"{fields} search fields that open the dialog, allowed is 1")
    return faults


def foreign_machinery(page: Page) -> list[str]:
    """Neither Thebe nor MathJax, nor the icon script that weighs more than the rest of the page."""
    scripts = " ".join(f"{tag.get('src', '')} {tag.get_text()}" for tag in page.soup("script"))
    names = ("thebe", "mathjax", "fontawesome.js")
    return [f"a script names {name}" for name in names if name in scripts.lower()]


def katex_where_needed(page: Page) -> list[str]:
    """KaTeX's three files on a page with math, none of them on a page without."""
    loaded = [Path(urlsplit(reference).path).name for reference in _loaded(page)]
    wanted = 1 if has_math(page) else 0
    counts = {name: loaded.count(name) for name in KATEX}
    return [
        f"{name} is loaded {count} times, wanted {wanted}"
        for name, count in counts.items()
        if count != wanted
    ]


def raw_math(page: Page) -> list[str]:
    """No formula is left as TeX between dollars, or as a bare environment, in the running text."""
    silent = {"script", "style", "pre", "code", "title"}
    faults = []
    for text in page.soup.find_all(string=RAW_MATH):
        names = {tag.name for tag in text.parents}
        classes = {name for tag in text.parents for name in tag.get_attribute_list("class")}
        if not names & silent and "math" not in classes:
            faults.append(f"raw math: {text.strip()[:80]}")
    return faults


def image_texts(page: Page) -> list[str]:
    """Each image says in words what it shows; a file name is no such text."""
    faults = []
    for image in page.soup.find_all("img"):
        alt = str(image.get("alt", "")).strip()
        if not alt or FILE_NAME.search(alt) or Path(alt).suffix.lower() in IMAGE_SUFFIXES:
            faults.append(f"image {image.get('src')} has the text {alt!r}")
    return faults


def launch_links(page: Page) -> list[str]:
    """The addresses that would run this page elsewhere."""
    links = [str(a["href"]) for a in page.soup.find_all("a", href=True)]
    return [link for link in links if any(offer in link for offer in OFFERS)]


def repository_buttons(page: Page) -> list[str]:
    """No button of another project: the theme's default address is the one of Jupyter Book."""
    found = page.soup.select('[class*="launch-buttons"], [class*="source-buttons"]')
    faults = [f"a button group {' '.join(tag['class'])}" for tag in found if isinstance(tag, Tag)]
    return faults + (["names executablebooks"] if "executablebooks" in page.text else [])


def broken_links(page: Page) -> list[str]:
    """Each local reference names a file of the site, each fragment an element of that file."""
    references = [str(tag["href"]) for tag in page.soup.find_all(href=True)]
    references += [reference for reference in _loaded(page) if reference]
    faults = []
    for reference in references:
        parts = urlsplit(reference)
        if parts.scheme or parts.netloc:
            continue
        target = page.local(reference)
        if not target.is_file() or not target.is_relative_to(page.site.resolve()):
            faults.append(f"{reference} names no file of the site")
        elif parts.fragment and not _has_anchor(target, page, unquote(parts.fragment)):
            faults.append(f"{reference} names no element of {target.name}")
    return faults


def _has_anchor(target: Path, page: Page, fragment: str) -> bool:
    same = target == page.path.resolve()
    soup = page.soup if same else read(target, page.site).soup
    return bool(soup.find(id=fragment) or soup.find("a", attrs={"name": fragment}))


def _squeeze(css: str) -> str:
    return re.sub(r"\s+", "", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL))


def missing_css(page: Page) -> list[str]:
    """The rules for figures in dark mode and for a phone are in the styles that the page loads."""
    sheets = _style_sheets(page)
    css = "".join(_squeeze(sheet.read_text(encoding="utf-8")) for sheet in sheets)
    return [f"no CSS rule {rule}" for rule in NEEDED_CSS if rule not in css]


def weight(page: Page) -> int:
    """Bytes of the page and all that it may load, each file once, fonts in their woff2 form."""
    files = {page.path.resolve()} | {page.local(reference) for reference in _loaded(page)}
    for sheet in _style_sheets(page):
        for reference in _css_references(sheet.read_text(encoding="utf-8")):
            font = (sheet.parent / urlsplit(reference).path).resolve()
            if font.suffix == ".woff2":
                files.add(font)
    return sum(file.stat().st_size for file in files if file.is_file())


def language_and_title(page: Page) -> list[str]:
    """A language, a title, and one heading of the first level (the print header is not shown)."""
    faults = []
    html = page.soup.find("html")
    if not isinstance(html, Tag) or html.get("lang") != "en":
        faults.append("<html> has no lang='en'")
    if page.soup.title is None or not page.soup.title.get_text(strip=True):
        faults.append("no <title>")
    headings = [h for h in page.soup.find_all("h1") if not h.find_parent(class_="onlyprint")]
    if len(headings) != 1:
        faults.append(f"{len(headings)} headings of the first level, wanted 1")
    return faults


def machine_paths(page: Page, paths: list[str]) -> list[str]:
    """No path of the machine that built the page."""
    return [f"holds the path {path}" for path in paths if path in page.text]


CHECKS = (
    external_requests,
    search_boxes,
    foreign_machinery,
    katex_where_needed,
    raw_math,
    image_texts,
    broken_links,
    missing_css,
    language_and_title,
)
