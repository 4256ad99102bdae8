"""The names of environment variables that set keys of a run; loads nothing else."""

import re

TRACK = "LOCKSTEP_TRACK"  # the metric backends of Sessions, separated by commas


def environment_variable(key: str) -> str:
    return "LOCKSTEP_" + key.upper().replace(".", "_")


def takes_no_value(word: str) -> bool:
    """Whether a flag of a user's function switches a boolean off: --no-augment. No key of a run
    starts like that."""
    return word.startswith("--no-")


def is_service_link(name: str) -> bool:
    """Whether Kubernetes has set this variable, for a service with a name like lockstep-run."""
    return bool(re.search(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP).*)?$", name))
