"""The names of environment variables that set keys of a run; loads nothing else."""


def environment_variable(key: str) -> str:
    return "LOCKSTEP_" + key.upper().replace(".", "_")
