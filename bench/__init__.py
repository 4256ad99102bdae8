"""Benchmarks (README.md). They start processes, hosts and stores with the helpers of the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
