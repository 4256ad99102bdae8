"""The work of `lockstep generate`: continue texts with a Llama. Imports torch."""

from __future__ import annotations

import argparse
import json

from lockstep import log
from lockstep.data.pairs.textfiles import read_input_lines
from lockstep.data.text.chat_tokenizer import ChatTokenizer
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.generation.sampling import SamplingParams, check_sampling, generate
from lockstep.generation.tensor_parallel import apply_tensor_parallel
from lockstep.models.llama_io import load_llama


def run_worker(args: argparse.Namespace) -> int:
    """Collective. Continue the texts with a model that is split over all workers."""
    with ElasticRuntime.join(threads=1) as runtime:
        log.set_up_logging(rank=runtime.world.rank)
        return print_continuations(args, runtime)


def print_continuations(args: argparse.Namespace, runtime: ElasticRuntime | None = None) -> int:
    """Collective with `runtime`. Print a single text as it is generated, several as JSON lines."""
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    check_sampling(args.tokens, sampling)
    loaded = load_llama(args.folder, args.step, device=runtime.world.device if runtime else None)
    group = apply_tensor_parallel(loaded.model, runtime, "--tensor") if runtime else None
    tokenizer = ChatTokenizer.load(loaded.tokenizer, loaded.hf_config)
    texts = args.text or read_input_lines(args.file)
    options = {"tokens": args.tokens, "sampling": sampling, "stops": args.stop, "chat": args.chat, "compile": args.compile, "group": group}
    continuations = ["" for _ in texts]
    single, prints = len(args.text) == 1, runtime is None or runtime.world.leader
    for row, text in generate(loaded.model, tokenizer, texts, **options):
        continuations[row] += text
        if single and prints:
            print(text, end="", flush=True)
    for continuation in continuations if prints else []:
        print("" if single else json.dumps(continuation, ensure_ascii=False))
    return 0
