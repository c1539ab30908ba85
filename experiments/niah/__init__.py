"""Needle in a haystack: whether a model trained on 1,024 tokens finds a needle among 65,536 and more.

Claim: causal ELSAA with shared planes finds the needle at every length. Exact attention finds it too, at quadratic
cost. The ablations show which parts of ELSAA are needed.

Command: python -m experiments.niah --length 65536

The model is trained at lengths up to 1,024 and evaluated at 512, 1,024, ... up to `--length`. Each accuracy is reported
with its number of examples and its 95 % interval. Results: docs/results/niah.md. `load` returns a trained model as a
function from tokens to logits.
"""

from experiments.niah.command import load

__all__ = ["load"]
