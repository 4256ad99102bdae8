"""Draw a schedule: rounds from top to bottom, ranks from left to right; as text or as SVG."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from lockstep.network.moves import Move, Schedule, rounds
from lockstep.network.simulate import Simulation
from lockstep.network.tree_exchange import WHOLE
from lockstep.units import format_seconds

MAX_RANKS = MAX_ROUNDS = 16  # that are drawn
# Pixels.
COLUMN = 64
ROW = 56
LEFT = 88
TOP = 56
STYLE = """text{font:13px system-ui,sans-serif;fill:#333}line{stroke-width:1.5}.rank{stroke:#bbb}
.copy,.copy path{stroke:#06c}.add,.add path{stroke:#c50}line.add{stroke-dasharray:6 3}\
path{fill:none;stroke-width:1.2}
@media(prefers-color-scheme:dark){text{fill:#ddd}.rank{stroke:#555}.copy,.copy path{stroke:#6bf}\
.add,.add path{stroke:#fa5}}"""


def draw_text(schedule: Schedule, simulation: Simulation) -> str:
    """Return a line for each round: what each rank sends, receives or adds, the largest message,
    the end."""
    shown = min(len(simulation.messages), MAX_RANKS)
    rows = [["round", *map(str, range(shown)), "largest", "done after"]]
    for number, moves in enumerate(islice(rounds(schedule), MAX_ROUNDS)):
        cells: defaultdict[int, list[str]] = defaultdict(list)
        for move in moves:
            cells[move.sender].append(f"→{move.receiver}")
            cells[move.receiver].append(f"{'+' if move.adds else '←'}{move.sender}")
        largest = max(move.stop - move.start for move in moves)
        row = [" ".join(sorted(cells[rank], reverse=True)) for rank in range(shown)]
        rows.append(
            [
                str(number + 1),
                *row,
                format_share(largest),
                format_seconds(simulation.round_ends_s[number]),
            ]
        )
    return "\n".join(
        [
            align(rows),
            *left_out(simulation),
            "→r sends to rank r, ←r receives a copy from it, +r receives and adds",
        ]
    )


def align(rows: list[list[str]]) -> str:
    """Return a table, its columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def format_share(units: int) -> str:
    """Return a part of the buffer: 1/8, 3/8, or 0.12."""
    for whole in range(1, 65):
        if abs(units * whole / WHOLE - round(units * whole / WHOLE)) < 1e-6 and units:
            return f"{round(units * whole / WHOLE)}/{whole}" if whole > 1 else "all"
    return f"{units / WHOLE:.2g}"


def left_out(simulation: Simulation) -> list[str]:
    ranks, count = len(simulation.messages) - MAX_RANKS, len(simulation.round_ends_s) - MAX_ROUNDS
    more = [
        f"{number:,} more {what}"
        for number, what in ((count, "rounds"), (ranks, "ranks"))
        if number > 0
    ]
    return [f"not drawn: {' and '.join(more)}"] if more else []


def draw_svg(schedule: Schedule, simulation: Simulation, title: str) -> str:
    """Return an SVG: an arrow for each move, from the top to the bottom of its round."""
    ranks, drawn = (
        min(len(simulation.messages), MAX_RANKS),
        list(islice(rounds(schedule), MAX_ROUNDS)),
    )
    width, bottom = max(500, LEFT + ranks * COLUMN + 48), TOP + len(drawn) * ROW
    notes = [*left_out(simulation), "solid: copies; dashed: the receiver adds"]
    parts = [f'<text x="12" y="20">{title}</text>']
    for rank in range(ranks):
        parts.append(
            f'<line class="rank" x1="{x_of(rank)}" x2="{x_of(rank)}" y1="{TOP}" y2="{bottom}"/>'
        )
        parts.append(f'<text x="{x_of(rank)}" y="{TOP - 10}" text-anchor="middle">{rank}</text>')
    for number, moves in enumerate(drawn):
        y = TOP + number * ROW
        parts.append(
            f'<text x="12" y="{y + ROW - 4}">'
            f"{format_seconds(simulation.round_ends_s[number])}</text>"
        )
        parts += [arrow(move, y) for move in moves if max(move.sender, move.receiver) < MAX_RANKS]
    parts += [
        f'<text x="12" y="{bottom + 24 + 18 * i}">{note}</text>' for i, note in enumerate(notes)
    ]
    heads = "".join(
        f'<marker id="{kind}" class="{kind}" viewBox="0 0 8 8" refX="7.5" refY="4" '
        'markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 .5L7.5 4L0 7.5"/></marker>'
        for kind in ("copy", "add")
    )
    height = bottom + 18 + 18 * len(notes)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
    )
    return "\n".join(
        [head, f"<style>{STYLE}</style>", f"<defs>{heads}</defs>", *parts, "</svg>", ""]
    )


def x_of(rank: int) -> int:
    return LEFT + rank * COLUMN + COLUMN // 2


def arrow(move: Move, y: int) -> str:
    kind = "add" if move.adds else "copy"
    ends = f'x1="{x_of(move.sender)}" y1="{y}" x2="{x_of(move.receiver)}" y2="{y + ROW - 2}"'
    return f'<line class="{kind}" marker-end="url(#{kind})" {ends}/>'
