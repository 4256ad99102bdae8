"""Check the built site: links, the menu, what a reader sees, and that nothing comes from elsewhere.

    python tools/check_site.py [FOLDER]

The builder checks links between pages; this also reads links in included files, pictures and
docstrings, and everything that a template adds. What is too wide for a screen of 1440 pixels, is
left as Markdown or cannot be read in dark colors is a fault of the page.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOP = Path(__file__).parents[1]
LOADED = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload"}
LINE, NAME = 107, 90  # columns that fit: of a block of code, and of code in a paragraph
WRAPPED = {"language-bash", "language-console", "language-text"}  # docs/stylesheets/site.css
MARKDOWN = re.compile(r"\*\*[^*\s][^*]*\*\*|\]\(|```|^\s*\|.*\|")


class Page(HTMLParser):
    """The links of a file of HTML or SVG, what it loads, and the ids that others can link to.

    `faults` has what a reader of the page sees.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.faults: list[str] = []
        self.title = ""
        self.titles = 0
        self._open: Counter[str] = Counter()
        self._code = ""
        self._is_wrapped = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._open[tag] += 1
        if tag == "h1":
            self.titles += 1
        if tag == "code":
            self._code = ""
        if tag == "img" and not values.get("alt"):
            self.faults.append(f"a picture without text: {values.get('src')}")
        classes = set(values.get("class", "").split())
        if "highlight" in classes:
            self._is_wrapped = bool(WRAPPED & classes)
        self.ids.add(values.get("id", ""))
        if "src" in values:
            self.loads.append(values["src"])
        if "href" in values:
            is_loaded = tag == "link" and LOADED & set(values.get("rel", "").split())
            (self.loads if is_loaded else self.links).append(values["href"])
        if "mermaid" in classes:
            self.loads.append("https://mermaid: a script draws it; add a picture instead")

    def handle_data(self, data: str) -> None:
        if self._open["head"] and self._open["title"]:
            self.title += data
        elif self._open["code"]:
            self._code += data
        elif not (self._open["script"] or self._open["style"]) and MARKDOWN.search(data):
            self.faults.append(f"Markdown that is not rendered: {data.strip()}")

    def handle_endtag(self, tag: str) -> None:
        self._open[tag] -= 1
        if tag != "code":
            return
        if self._open["pre"]:
            width = max(map(len, self._code.splitlines()), default=0)
            is_short = width <= LINE or self._is_wrapped
        else:
            width = len(" ".join(self._code.split()))
            is_short = width <= NAME or self._open["table"] > 0
        if not is_short:
            self.faults.append(f"code of {width} columns: {self._code.strip()[:60]}")


@cache
def read(path: Path) -> Page:
    return Page(path.read_text())


def problems(folder: Path) -> Iterator[str]:
    names: dict[str, Path] = {}  # title -> page
    for path in sorted(folder.rglob("index.html")):
        page = read(path)
        name = path.relative_to(folder)
        yield from (f"{name}: {fault}" for fault in page.faults)
        if page.titles != 1:
            yield f"{name}: {page.titles} headings of level 1"
        if page.title and names.setdefault(page.title, name) != name:
            yield f"{name}: has the title of {names[page.title]}: {page.title}"
    for path in sorted(folder.rglob("*.html")):
        page = read(path)
        for link in (*page.loads, *page.links):
            if fault := fault_of(folder, path, link, link in page.loads):
                yield f"{path.relative_to(folder)}: {fault}: {link}"
    for path in sorted(folder.rglob("*.css")):
        for host in re.findall(
            r"""(?:url\(|@import )["']?((?:https?:)?//[^"')]+)""", path.read_text()
        ):
            yield f"{path.relative_to(folder)}: loads from another host: {host}"
        for fault in faint(path.read_text()):
            yield f"{path.relative_to(folder)}: {fault}"
    for path in sorted(folder.rglob("*.svg")):
        if not re.search("prefers-color-scheme|<rect[^>]*100%", path.read_text()):
            yield f"{path.relative_to(folder)}: has no dark colors"


def faint(style: str) -> Iterator[str]:
    """Yield the colors of text in the schemes of a style that are hard to read."""
    for scheme, rules in re.findall(r'color-scheme="(\w+)"\] \{([^}]+)', style):
        colors = dict(re.findall(r"--([\w-]+): (#\w+);", rules))
        for text in {"ink", "quiet", "accent"} & colors.keys():
            for behind in {"md-default-bg-color", "md-code-bg-color", "tint"} & colors.keys():
                contrast = (light(colors[text]) + 0.05) / (light(colors[behind]) + 0.05)
                if max(contrast, 1 / contrast) < 4.5:
                    yield f"{scheme}: --{text} on --{behind} has a contrast below 4.5"


def light(color: str) -> float:
    """Return the relative luminance of #rrggbb or #rgb, as WCAG defines it."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def fault_of(folder: Path, path: Path, link: str, is_loaded: bool) -> str:
    """Return what is wrong with a link on the page `path`, or nothing."""
    parts = urlsplit(link)
    if parts.netloc:
        return "loads from another host" if is_loaded else ""
    if parts.scheme:  # data:, mailto:
        return ""
    place = unquote(parts.path)
    target = path if not place else (folder if place[0] == "/" else path.parent) / place.lstrip("/")
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "no such file"
    if parts.fragment and unquote(parts.fragment) not in read(target).ids:
        return "no such heading"
    return ""


def missing_pages(menu: str, docs: Path) -> list[str]:
    """Return the pages in `docs` that the menu, the text of mkdocs.yml, lacks."""
    listed = set(re.findall(r": (\S+\.md)$", menu, re.MULTILINE))
    return sorted({str(page.relative_to(docs)) for page in docs.rglob("*.md")} - listed)


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else TOP / "site"
    missing = missing_pages((TOP / "mkdocs.yml").read_text(), TOP / "docs")
    found = [*problems(folder), *(f"docs/{page}: not in the nav of mkdocs.yml" for page in missing)]
    print(*found, f"{len(list(folder.rglob('*.html')))} pages, {len(found)} problems", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
