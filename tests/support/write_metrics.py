"""Write metrics after a step until killed: `write_metrics.py FILE STEP`. Prints every 50th step."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.record.metrics import MetricsFile

if __name__ == "__main__":
    metrics = MetricsFile(Path(sys.argv[1]), int(sys.argv[2]))
    while True:
        step = metrics.last_step + 1
        metrics.log(step, {"loss": 1 / step, "seconds": 0.5})
        if step % 50 == 0:
            print(step, flush=True)
