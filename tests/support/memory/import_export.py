"""Import and export the Hugging Face folder FOLDER/hub; print by how many bytes the process grew."""

import resource
import sys
from pathlib import Path

from lockstep.models.llama_io import export_run, import_hub


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    folder, before = Path(sys.argv[1]), peak_bytes()
    import_hub(folder / "hub", folder / "run")
    export_run(folder / "run", None, folder / "back")
    print(peak_bytes() - before)
