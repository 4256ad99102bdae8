"""A script without torch whose rank 1 fails at each start, for test_plain_script.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

with open("report", "a") as file:
    file.write(f"rank {os.environ['RANK']}\n")
if os.environ["RANK"] == "1":
    while Path("report").read_text().count("\n") < 2 * (
        int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    ):
        time.sleep(0.01)
    raise ValueError("a bad record")
time.sleep(3600)
