"""The names of environment variables that set keys of a run; loads nothing else."""

TRACK = "LOCKSTEP_TRACK"  # the metric backends of Sessions, separated by commas


def environment_variable(key: str) -> str:
    return "LOCKSTEP_" + key.upper().replace(".", "_")


def takes_no_value(word: str) -> bool:
    """Whether a flag of a user's function switches a boolean off: --no-augment. No key of a run
    starts like that."""
    return word.startswith("--no-")
