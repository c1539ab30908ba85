"""Results that the paper reports: train and test accuracy in percent, by table, task and attention."""

from __future__ import annotations

from elsaa_jax.types import AttentionKind

Accuracies = dict[AttentionKind, tuple[float | str, float | str]]

TABLES: dict[str, dict[str, Accuracies]] = {
    "Table 1: long inputs": {
        "arxiv_full_32k": {
            "elsaa": (99.97, 93.93),
            "sort_lsh": (95.41, 84.94),
            "race": (100.00, 95.05),
            "sort_lsh_race": (99.95, 93.60),
            "exact": (81.77, 70.11),
        },
        "oxford_pets": {
            "elsaa": (91.55, 22.51),
            "sort_lsh": (23.96, 12.65),
            "race": (59.89, 16.13),
            "sort_lsh_race": (76.76, 19.00),
            "exact": (92.60, 24.66),
        },
        "flowers102": {
            "elsaa": (97.84, 42.45),
            "sort_lsh": (77.25, 37.25),
            "race": (91.66, 35.49),
            "sort_lsh_race": (95.98, 42.65),
            "exact": (97.81, 48.13),
        },
        "food101": {
            "elsaa": (76.43, 28.33),
            "sort_lsh": (59.63, 19.03),
            "race": (67.57, 24.00),
            "sort_lsh_race": (76.05, 26.67),
            "exact": (78.93, 29.96),
        },
    },
    "Table 2: text retrieval": {
        "retrieval": {
            "elsaa": (94.73, 65.34),
            "race": (94.95, 66.30),
            "sort_lsh_race": (94.28, 66.00),
            "exact": ("about 50", "about 50"),
        },
    },
    "Table 3: short inputs": {
        "imdb": {
            "elsaa": (90.68, 75.93),
            "sort_lsh": (70.45, 66.14),
            "race": (89.93, 77.41),
            "sort_lsh_race": (90.20, 77.71),
            "exact": (89.54, 78.67),
        },
        "fashion_mnist": {
            "elsaa": (87.79, 88.25),
            "sort_lsh": (82.11, 83.15),
            "race": (89.79, 89.43),
            "sort_lsh_race": (85.43, 86.39),
            "exact": (85.95, 85.81),
        },
    },
    "Table 5: causal": {
        "arxiv_causal_32k": {"elsaa": (100.0, 88.90), "race": (99.97, 87.84), "exact": (99.97, 87.96)},
        "arxiv_causal_64k": {"elsaa": (100.0, 91.47), "race": (99.88, 91.46), "exact": (99.83, 87.44)},
        "tiny_imagenet": {"elsaa": (94.44, 36.07), "race": (93.41, 36.39), "exact": (96.59, 37.32)},
    },
}

# Numbers of tokens per input.
LENGTHS = {
    "arxiv_full_32k": 32_000,
    "oxford_pets": 16_384,
    "flowers102": 16_384,
    "food101": 16_384,
    "retrieval": 64_000,
    "imdb": 512,
    "fashion_mnist": 784,
    "arxiv_causal_32k": 32_000,
    "arxiv_causal_64k": 64_000,
    "tiny_imagenet": 1024,
}

# Table 4: test accuracy in percent by length. None means out of memory.
NIAH_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
NIAH: dict[AttentionKind, tuple[float | None, ...]] = {
    "exact": (100.0, 100.0, 100.0, 100.0, 100.0, 100.0, None, None),
    "elsaa": (100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 98.8, 84.2),
    "sort_lsh": (24.6, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0),
    "race": (11.0, 100.0, 100.0, 52.0, 13.4, 6.4, 4.8, 2.2),
    "performer": (19.2, 100.0, 88.2, 87.6, 88.2, 87.4, 83.2, 83.4),
}
