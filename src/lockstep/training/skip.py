"""Micro-batches to skip, as a user writes them: "120:3" is micro-batch 3 of step 120."""

from collections.abc import Iterator, Mapping, Sequence


def parse_skip(texts: Sequence[str]) -> dict[int, list[int]]:
    """Return the micro-batches by number of steps committed before. ValueError."""
    skipped: dict[int, list[int]] = {}
    for text in texts:
        step, colon, k = text.partition(":")
        if not (colon and step.isdecimal() and k.isdecimal() and int(step)):
            raise ValueError(f"{text!r} is not a step and a micro-batch")
        skipped[int(step) - 1] = sorted({*skipped.get(int(step) - 1, []), int(k)})
    return skipped


def skip_texts(skipped: Mapping[int, Sequence[int]]) -> list[str]:
    """Return the texts that `parse_skip` reads, in order."""
    return [f"{step + 1}:{k}" for step, ks in sorted(skipped.items()) for k in ks]


def skip_conflicts(
    name: str, texts: Sequence[str], micro_batches: int
) -> Iterator[tuple[str, str]]:
    """Yield (what, hint) for texts that are wrong. name: of the value that holds them."""
    try:
        skipped = parse_skip(texts)
    except ValueError as error:
        hint = "write STEP:K, such as 120:3, with the step of metrics.jsonl and K from 0"
        yield f"{name}: {error}", hint
        return
    last = micro_batches - 1
    outside = {step: [k for k in ks if k > last] for step, ks in skipped.items()}
    if wrong := skip_texts(outside):
        what = f"{name} has {', '.join(wrong)}, and the micro-batches of a step are 0 to {last}"
        yield what, "remove these entries"
    if empty := [str(step + 1) for step, ks in skipped.items() if len(ks) > last]:
        what = f"{name} leaves no micro-batch of step {', '.join(empty)}"
        yield what, "leave one in each step"
