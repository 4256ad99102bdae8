"""Check the built site: links, the menu, and that no page loads a file from another host.

    python tools/check_site.py [FOLDER]

The builder checks links between pages; this also reads links in included files, pictures and
docstrings, and everything that a template adds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOP = Path(__file__).parents[1]
LOADED = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload"}


class Page(HTMLParser):
    """The links of a file of HTML or SVG, what it loads, and the ids that others can link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if "src" in values:
            self.loads.append(values["src"])
        if "href" in values:
            is_loaded = tag == "link" and LOADED & set(values.get("rel", "").split())
            (self.loads if is_loaded else self.links).append(values["href"])
        if "mermaid" in values.get("class", "").split():
            self.loads.append("https://mermaid: a script draws it; add a picture instead")


@cache
def read(path: Path) -> Page:
    return Page(path.read_text())


def problems(folder: Path) -> Iterator[str]:
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
