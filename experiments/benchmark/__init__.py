"""Speed and memory over length: from which length on ELSAA is faster than exact attention and other packages.

Command: python -m experiments.benchmark

Every contender has a process of its own, and they take turns, so that all see the same noise of the machine. A time is
the median of its runs, with the quartiles. The peak of the machine is one large matrix product, which takes turns with
the others. Lengths that would need too much time or memory, as estimated from the growth so far, are skipped. Results:
docs/results/benchmark.md.
"""
