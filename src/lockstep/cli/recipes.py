"""`lockstep recipes`: list the run files that come with Lockstep, or print one."""

import argparse

from lockstep.config.resolve import recipes
from lockstep.errors import UsageError


def main(args: argparse.Namespace, rest: list[str]) -> int:
    texts = {name: path.read_text(encoding="utf-8") for name, path in sorted(recipes().items())}
    if args.name is None:
        width = max(map(len, texts), default=0)
        print("\n".join(f"{name:<{width}}  {first_sentence(text)}" for name, text in texts.items()))
        print(
            "\nlockstep recipes NAME > NAME.toml copies one; lockstep train recipes/NAME.toml trains it"
        )
        return 0
    name = args.name.removeprefix("recipes/").removesuffix(".toml")
    if name not in texts:
        raise UsageError(
            f"there is no recipe {args.name!r}", "command line", f"available: {', '.join(texts)}"
        )
    print(texts[name], end="")
    return 0


def first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the start of a run file."""
    lines = [line.lstrip("# ") for line in text.splitlines()]
    comment = " ".join(lines[: lines.index("")] if "" in lines else lines)
    return comment.partition(". ")[0].rstrip(".")
