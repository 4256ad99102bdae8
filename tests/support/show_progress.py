"""Show the progress of a run: `show_progress.py TOTAL START EVERY_S SHOWS [wait]`.

With `wait` it reads a line of standard input after step 20. SHOWS is 0 or 1.
"""

from __future__ import annotations

import sys

from lockstep.record.progress import ProgressDisplay

if __name__ == "__main__":
    total, start, every_s, shows = (int(argument) for argument in sys.argv[1:5])
    with ProgressDisplay(total, start, lambda: bool(shows), every_s=every_s) as progress:
        for step in range(start + 1, total + 1):
            progress.step(step, {"loss": 1.5})
            if "wait" in sys.argv and step == 20:
                sys.stdin.readline()
    print("ended", file=sys.stderr)
