"""The paper's rank theory, computed and tested: certificates, ranks, bounds, counts, and error over entropy.

Claims: RACE alone has a rank of at most L (2^P - 1) + 1, at any length. The sparse branch that is paired by rank has a
perfect matching by construction, so it always has full rank. The theorem's bound holds for independent edges, and not
for those of a real hash.

Command: python -m experiments.rank

With --length, --tables, --bits and --rank it computes whether sparse plus low-rank attention has full rank, and with
which probability. docs/theory.md explains the theory. Results: docs/results/rank.md.
"""
