"""`lockstep generate`: continue texts, in this process or in several that share the model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lockstep.cli.start import run_in_group
from lockstep.corpus.files import read_input_lines
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.elastic.runtime import ElasticRuntime


def main(args: argparse.Namespace, rest: list[str]) -> int:
    args.text += rest  # argparse leaves texts behind an option over
    if args.tensor == 1:
        return print_continuations(args, None)
    if args.compile:
        raise UsageError(
            f"--compile is not supported with --tensor {args.tensor}",
            "command line",
            "remove one of them",
        )
    with TemporaryDirectory(prefix="lockstep-generate-") as folder:
        words = ["generate", *sys.argv[2:]]
        if not args.text and not args.file:  # the workers have no standard input
            lines = Path(folder) / "lines"
            lines.write_bytes(sys.stdin.buffer.read())
            words += ["--file", str(lines)]
            args.file = lines
        return run_in_group(
            words,
            args.tensor,
            lambda runtime: print_continuations(args, runtime),
            option="--tensor",
        )


def print_continuations(args: argparse.Namespace, runtime: ElasticRuntime | None) -> int:
    """Collective with `runtime`. Print a single text as it is generated, several as JSON lines."""
    # These load torch, which starting workers does not need.
    from lockstep.corpus.chat_tokenizer import ChatTokenizer
    from lockstep.generation.sampling import (
        SamplingParams,
        apply_tensor_parallel,
        check_sampling,
        generate,
    )
    from lockstep.models.llama import Llama
    from lockstep.models.llama_io import load_llama

    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    check_sampling(args.tokens, sampling)
    loaded = load_llama(args.folder, args.step, device=runtime.world.device if runtime else None)
    if not isinstance(loaded.model, Llama):
        raise UsageError(
            f"the run in {args.folder} trains a model of transformers, "
            "which lockstep generate does not decode",
            "llama.backend of the run",
            f"try lockstep checkpoint export {args.folder}, then transformers",
        )
    group = apply_tensor_parallel(loaded.model, runtime, "--tensor") if runtime else None
    tokenizer = ChatTokenizer.load(loaded.tokenizer, loaded.hf_config)
    texts = args.text or read_input_lines(args.file)
    continuations = ["" for _ in texts]
    single, prints = len(args.text) == 1, runtime is None or runtime.world.leader
    for row, text in generate(
        loaded.model,
        tokenizer,
        texts,
        tokens=args.tokens,
        sampling=sampling,
        stops=args.stop,
        chat=args.chat,
        compile=args.compile,
        group=group,
    ):
        continuations[row] += text
        if single and prints:
            print(text, end="", flush=True)
    for continuation in continuations if prints else []:
        print("" if single else json.dumps(continuation, ensure_ascii=False))
    return 0
