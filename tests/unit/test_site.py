"""The check of the built site, and docstrings on the page of the API."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_site  # noqa: E402
import site_pictures  # noqa: E402


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="../b/">', ""),
        ('<a href="../b/#here">', ""),
        ('<a href="/b/#here">', ""),
        ('<a href="https://other.example/">', ""),
        ('<a href="../c/">', "no such file"),
        ('<img src="../c.png" alt="c">', "no such file"),
        ('<a href="../b/#there">', "no such heading"),
        ('<a href="#there">', "no such heading"),
        ('<img src="https://other.example/c.png" alt="c">', "loads from another host"),
        ('<script src="//other.example/c.js">', "loads from another host"),
        ('<link rel="stylesheet" href="https://other.example/c.css">', "loads from another host"),
        ('<link rel="canonical" href="https://other.example/a/">', ""),
        ('<pre class="mermaid">', "loads from another host"),
        ('<img src="../b.svg">', "a picture without text"),
        ("<h1></h1>", "2 headings of level 1"),
        ("<title>b</title>", "has the title of a/index.html"),
        ("<p>a **bold** word</p>", "Markdown that is not rendered"),
        ("<p>a [link](<code>b</code>)</p>", "Markdown that is not rendered"),
        ("<p>2**8, *names, **values <code>**c**</code></p>", ""),
        (f"<p><code>{'c' * 91}</code></p>", "code of 91 columns"),
        (f"<table><td><code>{'c' * 91}</code></table>", ""),
        (f"<pre><code>{'c' * 107}</code></pre>", ""),
        (f"<pre><code>{'c' * 108}</code></pre>", "code of 108 columns"),
        (f'<i class="highlight language-bash"><pre><code>{"c" * 108}</code></pre>', ""),
    ],
)
def test_a_fault_of_a_page_is_found(html: str, fault: str, tmp_path: Path) -> None:
    for name, text in {"a": html, "b": '<title>b</title><h2 id="here">'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(f"<head><h1>{text}")
    (tmp_path / "b.svg").write_text("@media (prefers-color-scheme: dark) {}")
    found = list(check_site.problems(tmp_path))
    assert len(found) == bool(fault)
    assert all(f"/index.html: {fault}" in problem for problem in found)


def test_colors_that_are_hard_to_read_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("text {fill: #333}")
    colors = "--ink: #767676; --quiet: #777; --md-default-bg-color: #fff;"
    (tmp_path / "a.css").write_text(f'[data-md-color-scheme="default"] {{ {colors} }}')
    assert list(check_site.problems(tmp_path)) == [
        "a.css: default: --quiet on --md-default-bg-color has a contrast below 4.5",
        "a.svg: has no dark colors",
    ]
    style = (ROOT / "docs/stylesheets/site.css").read_text()
    assert list(check_site.faint(style)) == []
    assert list(check_site.faint(style.replace("--accent: #0b6b57", "--accent: #5cc9ae"))) != []


def test_a_style_that_loads_from_another_host_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text('@import "https://a.example/b.css"; p {background: url(b.png)}')
    assert list(check_site.problems(tmp_path)) == [
        "a.css: loads from another host: https://a.example/b.css"
    ]


def test_a_page_outside_of_the_menu_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").touch()
    (tmp_path / "b.md").touch()
    assert check_site.missing_pages("nav:\n  - A: a.md\n", tmp_path) == ["b.md"]


def test_the_pictures_of_the_site_are_those_of_the_command() -> None:
    files = list(site_pictures.FOLDER.glob("*.png"))
    assert {path.stem for path in files} == site_pictures.PICTURES.keys()
    assert sum(path.stat().st_size for path in files) < 600_000


def test_the_first_screen_has_commands_of_the_readme() -> None:
    page, readme = ((ROOT / name).read_text() for name in ("docs/index.md", "README.md"))
    (block,) = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    assert [
        line for line in block.splitlines() if line.partition("  #")[0].strip() not in readme
    ] == []


def test_docstrings_are_plain_text_with_code() -> None:
    loader = jinja2.FileSystemLoader(ROOT / "tools/site_templates/python/material")
    template = jinja2.Environment(loader=loader, autoescape=True).get_template(
        "docstring.html.jinja"
    )
    text = 'Sum of *all* `a < b`.\n\nunits  names, "layers.*"; or\n       *none*\n\n    step()  # 1'
    lines = template.render(docstring_sections=[SimpleNamespace(value=text)]).split("\n")
    assert [line.strip() for line in lines if line.strip()] == [
        "<p>Sum of *all* <code>a &lt; b</code>.</p>",
        '<dl class="names">',
        "<dt>units</dt>",
        "<dd>names, &#34;layers.*&#34;; or       *none*</dd>",
        "</dl>",
        '<div class="columns">    step()  # 1</div>',
    ]
