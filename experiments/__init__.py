"""Experiments that test the paper's claims. Each is a command; `--help` lists its flags.

    python -m experiments.niah           Needle in a haystack: retrieval up to 65,536 tokens and beyond.
    python -m experiments.imdb           IMDB: the sentiment of reviews of 512 tokens.
    python -m experiments.arxiv          ArXiv: the archive of papers that are packed to one long input.
    python -m experiments.retrieval      Text retrieval: whether two long texts are from the same archive.
    python -m experiments.vision         Images as long sequences of patches, from four data sets.
    python -m experiments.tiny_imagenet  Tiny ImageNet: causal attention over patches in raster order.
    python -m experiments.paper          The paper's tables beside ours, with a verdict on each of its claims.
    python -m experiments.rank           The paper's rank theory: certificates, and experiments that test them.
    python -m experiments.benchmark      Speed and memory over length, compared with other packages.

`experiments.engine` is the code that they share: training, checkpoints, data sets, models, reports and command lines.
"""
