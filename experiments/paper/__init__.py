"""The paper's tables beside ours: whether each of its claims holds in our runs.

Claim: every row of the paper is one command here, with one budget for all methods.

Command: python -m experiments.paper --run

`--run` trains the missing runs, each in a process of its own: one seed of every method on every task, and three seeds
of elsaa and exact on the short tasks. If you interrupt it, run the same command again to continue. Without `--run`, the
report is written from the runs that are done. The table of needle in a haystack comes from `experiments.niah`. Results:
docs/results/paper.md.
"""
