"""Run `lockstep` with the given words; exit with its code, or with 100 if it imported torch or obstore."""

from __future__ import annotations

import sys

from lockstep.cli.main import main

try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = int(exit.code or 0)
sys.exit(100 if {"torch", "obstore"} & sys.modules.keys() else code)
