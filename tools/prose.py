"""Find phrases that the writing rules of CONTRIBUTING.md rule out: vague actors, inverted clauses,
stock phrases, British spelling.

    python tools/prose.py [-q] [FILE or FOLDER...]

Reads docstrings, comments and message strings of src, tests, bench, examples and tools, every
Markdown file, and the commit subjects after `FIRST_COMMIT`. Prints each hit (-q: the summary
alone), then hits per 1,000 words. Exits with code 1 above the limits below.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

TOP = Path(__file__).parents[1]
FIRST_COMMIT = "bfc2139"

# Ratchets: lower them when the tree gets better.
LIMIT = 0.2  # hits per 1,000 words
WIDE_LIMIT = 0  # lines of Markdown prose over 100 columns

PATTERNS = {
    "vague actor": r"\b(?:nobody|somebody|everybody|whoever|whomever|whom|whatever|whichever)\b",
    "clause that begins with who": r"(?:^|[.:;,(] |\b(?:and|but|of|from|by|than|to|as) )"
    r"who (?!(?:is|are|was|were)\b[^.;]*\?)[a-z]",
    "those that": r"\b(?:those|the ones|all|others|ones) (?:that|who)\b|\bone who\b|\ball have\b",
    "go on": r"\b(?:go|goes|going|went|gone) on\b",
    "anew": r"\banew\b|\b(?:begin at|begins|began|begun)\b|\bmade new\b"
    r"|\b(?:is|are|be|was|were) (?:done|made) again\b|\bagain and again\b",
    "come to": r"\bc(?:ome|omes|ame|oming) to (?:be|its end|an end|the end)\b|\bhas come\b",
    "told": r"\btold\b",
    "stand": r"\bstands\b|\bstand(?:ing)? (?:in|at|for|beside|by|on|there|once)\b|\bdo not stand\b"
    r"|\b(?:written|writes?) down\b",
    "own": r"\b(?:an?|the|each|one|in|on) (?:\w+ ){1,2}(?:of|by|for) (?:its|their|his|our) own\b"
    r"|\ban? \w+ of (?:yours|ours)\b"
    r"|\bof (?:its|his|her|their|our|one's) own\b",
    "without": r"\bwithout (?:a word|a step forward|an end|a majority of)\b|\bof before\b"
    r"|\bsaid before\b|\bput away\b",
    "left out": r"\bleft out(?! of)\b",
    "break off": r"\bbr(?:oke|oken|eak|eaks|eaking) off\b|\bby halves\b|\bfor life\b|\blike mail\b"
    r"|\bl(?:ie|ies|ay) (?:here|there|about)\b",
    "at work": r"\bat work\b|\bbrings? down\b|\bin its midst\b",
    "beside an option": r"(?:^|\s)-{2}[\w-]+ beside (?:-{2}|X)",
    "inverted question": r"\bwhat (?:is|was) (?:done|to be done|lost|kept|said|given|held)\b"
    r"|\bsince when\b|\bhow it is\b(?! \w+ed\b)",
    "see to it": r"\b(?:see|sees) to it\b|\b(?:find|finds|found) out\b|\bhear(?:s|d)? of\b"
    r"|\bhas ended\b|\b[Tt]hen those\b",
    "says": r"\bsays\b|\bsay (?:which|so|what|who|how|why|where)\b|\bsaid\b"
    r"|\bholds? the others up\b",
    "rest on": r"\brests? on\b|\bwhat travels\b|\b[Nn]othing moves\b|\bit begins with\b",
    "idiom": r"\bas (?:it|they) (?:comes?|stands?)\b|\bnothing but\b|\bthere again\b|\bfor ever\b"
    r"|\bhas(?: not)? got\b"
    r"|\blets? (?:it )?go of\b",
    "presence": r"\b(?:is|are|was|were) (?:not )?there (?:yet|already|again)\b"
    r"|\b(?:is|are) not there\b|\bwhat is due\b",
    "fragment: What ...": r"^(?:What|Who|Which) [^?:|]*\.$|^A function of (?:the|its)\b",
    "old term": r"\b(?:zygote|nursery|courier|parcel|arbiter|diary|keeper|handover)s?\b",
    "gerund as a first word": r"^(?:Deciding|Waiting|Finding|Making|Telling"
    r"|Saying|Going|Taking|Giving|Bringing|Noticing) ",
    "British spelling": r"\b\w*(?:[a-z]{4}isation|(?:token|serial|initial|normal"
    r"|material|optim|organ|recogn|synchron)is(?:e|es|ed|ing))\b"
    r"|\b\w*(?:colour|behaviour|neighbour|favour|honour)\w*\b|\bcentre\b|\bcancelled\b|\blearnt\b"
    r"|\bwhilst\b|\blicences?\b|\b(?:label|model|travel|signal)l(?:ed|ing)\b"
    r"|\b(?:analys(?:e|es|ed|ing)|artefacts?|per cent|grey)\b",
}
COMPILED = {
    name: re.compile(pattern, re.IGNORECASE if name == "vague actor" else 0)
    for name, pattern in PATTERNS.items()
}

# Legitimate uses: removed before the patterns are tried.
ALLOWED = [
    r'"[^"]{1,16}"',
    r"\bbegins? at (?:step|position|byte|index|line|offset) ",
]
SKIPPED = {"tools/prose.py", "tests/support/prose_rows.py", "tests/unit/test_prose.py"}


def find(text: str) -> list[str]:
    """Return the name of the pattern of each hit in `text`, one paragraph without line breaks."""
    for allowed in ALLOWED:
        text = re.sub(allowed, " ", text)
    return [name for name, pattern in COMPILED.items() for _ in pattern.finditer(text)]


def main(arguments: list[str]) -> int:
    quiet, arguments = "-q" in arguments, [argument for argument in arguments if argument != "-q"]
    requested = [Path(argument).resolve() for argument in arguments]
    paths = [
        file
        for path in requested
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
    ] or tracked_files()
    words, hits, by_pattern, by_file = 0, [], Counter[str](), Counter[str]()
    for path in paths:
        name = str(path.relative_to(TOP))
        if name in SKIPPED or path.suffix not in (".py", ".md"):
            continue
        for line, text in texts(path):
            words += len(re.findall(r"[A-Za-z']+", text))
            for pattern in find(text):
                hits.append(f"{name}:{line}: {pattern}: {text[:160]}")
                by_pattern[pattern] += 1
                by_file[name] += 1
    subjects = [] if arguments else commit_subjects()
    for subject in subjects:
        words += len(subject.split())
        patterns = find(subject) + (
            ["a commit subject over 72 characters"] if len(subject) > 72 else []
        )
        hits += [f"commit: {pattern}: {subject}" for pattern in patterns]
    wide = [place for path in paths if path.suffix == ".md" for place in wide_lines(path)]
    if not quiet:
        print("\n".join([*hits, *(f"{place}: over 100 columns" for place in wide)]))
    rate = 1000 * len(hits) / max(words, 1)
    print(
        "hits by pattern: "
        f"{', '.join(f'{name} {count}' for name, count in by_pattern.most_common())}"
    )
    print(
        f"hits by file: {', '.join(f'{name} {count}' for name, count in by_file.most_common(12))}"
    )
    print(
        f"{len(hits)} hits in {words:,} words: {rate:.2f} per 1,000 (limit {LIMIT}); "
        f"{len(wide)} wide lines (limit {WIDE_LIMIT})"
    )
    return 1 if rate > LIMIT or len(wide) > WIDE_LIMIT else 0


def tracked_files() -> list[Path]:
    if (TOP / ".git").exists():
        listed = subprocess.run(
            ["git", "-C", str(TOP), "ls-files"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        return [TOP / name for name in listed if (TOP / name).is_file()]
    folders = ["src", "tests", "bench", "examples", "docs", "tools"]
    return [
        *TOP.glob("*.md"),
        *(
            path
            for folder in folders
            for path in sorted((TOP / folder).rglob("*"))
            if path.is_file()
        ),
    ]


def commit_subjects() -> list[str]:
    """Return the subjects of the commits after `FIRST_COMMIT`; none where the history lacks it (a
    shallow clone, an archive)."""
    command = ["git", "-C", str(TOP), "log", "--no-merges", "--format=%s", f"{FIRST_COMMIT}..HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each paragraph of prose in a Python or Markdown file, with X for
    inline code."""
    located = (
        python_texts(path.read_text()) if path.suffix == ".py" else markdown_texts(path.read_text())
    )
    for line, text in located:
        text = re.sub(r"``?[^`]*``?", "X", " ".join(text.split()))
        if text:
            yield line, text


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            docstrings.add(first.value)
            yield from paragraphs(first.lineno, str(ast.literal_eval(first.value)).splitlines())
    fragments = {
        part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in docstrings
            and node not in fragments
        ):
            text = node.value
        else:
            continue
        if len(re.findall(r"[A-Za-z']{2,}", text)) >= 4 and not re.search(
            r"^(?:import|from|def) |\w\(|==", text, re.MULTILINE
        ):
            yield from paragraphs(node.lineno, text.splitlines())
    yield from comments(source)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment; full-line comments on consecutive lines are one paragraph."""
    start, last, block = 0, -2, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# ?(?:type:|noqa|!)", token.string):
            continue
        row, text = token.start[0], token.string.lstrip("# ")
        if row == last + 1 and not token.line[: token.start[1]].strip():
            last, block = row, f"{block} {text}"
            continue
        yield start, block
        start, last, block = row, row, text
    yield start, block


def markdown_texts(source: str) -> Iterator[tuple[int, str]]:
    lines = [re.sub(r"\]\([^)]*\)", "]", line) for line in outside_fences(source.splitlines())]
    starts_item = re.compile(r"\s*(?:[-*|#>]|\d+\.) ?")
    yield from paragraphs(1, lines, starts_item)


def outside_fences(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, those of fenced code blocks as empty ones."""
    fenced = False
    for line in lines:
        fence = line.lstrip().startswith("```")
        yield "" if fenced or fence else line
        fenced = fenced != fence


def paragraphs(
    first_line: int, lines: Iterable[str], starts_item: re.Pattern[str] | None = None
) -> Iterator[tuple[int, str]]:
    start, block = first_line, ""
    for number, line in enumerate(lines, first_line):
        item = starts_item.match(line) if starts_item else None
        if not line.strip() or item:
            yield start, block
            start, block = number, ""
        block = (
            f"{block} {line[item.end() :] if item else line}"
            if block
            else line[item.end() :]
            if item
            else line
        )
        start = start if block.strip() else number + 1
    yield start, block


def wide_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(outside_fences(path.read_text().splitlines()), 1):
        if len(line) > 100 and not line.startswith(("|", "[", "!", "<")):
            yield f"{path.relative_to(TOP)}:{number}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
