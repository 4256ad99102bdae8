"""`lockstep translate`: print translations, and nothing else, on standard output."""

import argparse

from lockstep.corpus.files import read_input_lines
from lockstep.generation.beam_search import translate
from lockstep.models.load_translator import load_translator


def main(args: argparse.Namespace, rest: list[str]) -> int:
    translator = load_translator(args.folder, step=args.step, average=args.average)
    texts = args.text or read_input_lines(None)
    for line in translate(translator.model, translator.tokenizer, texts, beams=args.beams):
        print(line)
    return 0
