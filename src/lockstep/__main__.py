"""`python -m lockstep`: the command, for torchrun and other starters that want a module."""

import sys

from lockstep.cli.main import main

sys.exit(main())
