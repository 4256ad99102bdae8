"""Compute the scores of some translations with one reference, as `lockstep evaluate` does.

python examples/learn/error_rates.py
"""

from __future__ import annotations

from lockstep.tasks.translation import score

REFERENCE = "the cat sat on the mat"
TRANSLATIONS = (
    "the cat sat on the mat",
    "the cat sits on the mat",
    "teh kat sat on the mat",
    "on the mat sat the cat",
    "the cat",
    "the cat sat on the mat and then it sat on the hat",
)

print("  CER    WER   BLEU  exact  translation")
for text in TRANSLATIONS:
    scores = score([text], [REFERENCE], language="en")
    cer, wer, bleu, exact = (float(scores[key]) for key in ("cer", "wer", "bleu", "exact_match"))
    print(f"{cer:.3f}  {wer:.3f}  {bleu:5.1f}  {exact:5.0f}  {text}")

both = score(["a dog", "the cat sits on the mat"], ["a cat", REFERENCE], language="en")
print(f"{both['cer']:.3f}  {both['wer']:.3f}                two sentences as one corpus")
