"""Write records to the status board argv[1] in a loop: test_status_board.py.

A torn record is detectable: step, phase, collective and bytes follow from one counter.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from lockstep.runtime.status_board import PHASES, StatusBoard

board = StatusBoard(Path(sys.argv[1]))
board.enter("joining", generation=7)
for n in count(1):
    board.enter(PHASES[n % len(PHASES)], n)
    board.enter_collective(n << 32 | n)
