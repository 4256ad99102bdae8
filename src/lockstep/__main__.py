"""`python -m lockstep`: the command, for torchrun and other launchers that start a module."""

import sys

from lockstep.cli.main import main

sys.exit(main())
