"""Write metrics while the disk is full twice: `metrics_on_full_disk.py FILE`.

A limit on the file size simulates the full disk. Prints the steps in the file while it is full, and
finally whether all steps are there.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys
from pathlib import Path

from lockstep.record.metrics import MetricsFile, read_metrics


def limit_file_size(size: int = resource.RLIM_INFINITY) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def log_steps(metrics: MetricsFile, first: int, last: int) -> None:
    for step in range(first, last + 1):
        metrics.log(step, {"loss": 1 / step})


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = Path(sys.argv[1])
    metrics = MetricsFile(path, 0)
    log_steps(metrics, 1, 10)
    limit_file_size(
        path.stat().st_size + 15
    )  # only a part of the next line fits: the kernel writes that part
    log_steps(metrics, 11, 20)
    print(
        "WHILE FULL",
        [line["step"] for line in read_metrics(path)],
        path.read_bytes().endswith(b"}\n"),
    )
    limit_file_size()
    log_steps(metrics, 21, 25)
    limit_file_size(path.stat().st_size)
    log_steps(metrics, 26, 27)
    limit_file_size()
    metrics.close()
    print("AT LAST", [line["step"] for line in read_metrics(path)] == list(range(1, 28)))
