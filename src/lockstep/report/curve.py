"""The values of a run by step, in bounded memory."""

import math
from operator import itemgetter

BINS = 600  # of a curve
LARGEST = 1e290  # drawn value: sums, differences and percents of larger ones overflow


class Curve:
    """Values by step in at most BINS bins of equal width. A bin keeps the lowest and the highest
    value, so that a spike of one step stays visible."""

    def __init__(self) -> None:
        self.width = 1  # steps of a bin
        self.bins: dict[int, list[float]] = {}  # by step // width: sum, count, lowest, highest
        # (step, value)
        self.last = (0, math.nan)
        self.lowest = (0, math.inf)
        self.highest = (0, -math.inf)
        # (first step, count) of NaN, infinities and what is beyond LARGEST
        self.not_finite = (0, 0)

    def add(self, step: int, value: float) -> None:
        self.last = (step, value)
        if not abs(value) < LARGEST:
            self.not_finite = (self.not_finite[0] or step, self.not_finite[1] + 1)
            return
        cell = self.bins.get(step // self.width)
        if cell is None:
            cell = self.bins[step // self.width] = [0.0, 0, math.inf, -math.inf]
        cell[0] += value
        cell[1] += 1
        if value < cell[2]:
            cell[2] = value
            self.lowest = min(self.lowest, self.last, key=itemgetter(1))
        if value > cell[3]:
            cell[3] = value
            self.highest = max(self.highest, self.last, key=itemgetter(1))
        if len(self.bins) > BINS:
            self._double_width()

    def _double_width(self) -> None:
        bins = self.bins
        self.width *= 2
        self.bins = {}
        for number, cell in bins.items():
            other = self.bins.setdefault(number // 2, cell)
            if other is not cell:
                other[0] += cell[0]
                other[1] += cell[1]
                other[2] = min(other[2], cell[2])
                other[3] = max(other[3], cell[3])

    @property
    def total(self) -> float:
        return math.fsum(cell[0] for cell in self.bins.values())

    def points(self) -> list[tuple[float, float, float, float]]:
        """Return (step, mean, lowest, highest) of each bin; the step is the middle of the bin, or
        the last one if that is before."""
        half = (self.width - 1) / 2
        return [
            (min(number * self.width + half, self.last[0]), cell[0] / cell[1], cell[2], cell[3])
            for number, cell in sorted(self.bins.items())
        ]
