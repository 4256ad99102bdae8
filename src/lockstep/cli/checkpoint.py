"""`lockstep checkpoint`: list, verify, digest, import and export checkpoints."""

import argparse

from lockstep.checkpoint import commands
from lockstep.errors import UsageError
from lockstep.log import printable


def main(args: argparse.Namespace, rest: list[str]) -> int:
    if args.action == "import" or (
        args.action == "export" and (args.adapter or (args.folder / "model.json").is_file())
    ):
        print(convert_llama(args))
    elif args.action == "list":
        print(printable(commands.list_table(args.folder)))
    elif args.action == "digest":
        print(commands.digest_line(args.folder, args.step))
    elif args.action == "export":
        print(
            commands.export(args.folder, args.step, args.out or args.folder / "model.safetensors")
        )
    else:
        intact, lines = commands.verify(args.folder)
        print(printable("\n".join(lines)))
        return 0 if intact else 3
    return 0


def convert_llama(args: argparse.Namespace) -> str:
    # Loads torch, which verify and digest do not need.
    from lockstep.models.llama_io import export_run, import_hub

    if args.out is None:
        raise UsageError(
            f"checkpoint {args.action} needs a folder to write",
            "command line",
            "name a new one with --out",
        )
    if args.action == "import":
        return import_hub(args.folder, args.out)
    dtype = args.dtype or ""
    return export_run(
        args.folder, args.step, args.out, args.shard_bytes, dtype, adapter=args.adapter
    )
