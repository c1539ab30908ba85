"""Efficient low-rank and sparse attention (ELSAA) for JAX and Flax."""

import importlib.metadata

from elsaa_jax.attention import elsaa_attention
from elsaa_jax.blocks.exact import exact_attention
from elsaa_jax.config import ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from elsaa_jax.fusion import fuse, merge, sparse_multiplier
from elsaa_jax.hashing import gray_rank, hard_codes, sample_planes, soft_codes
from elsaa_jax.layers.hooks import attention_fn, sample_hashes
from elsaa_jax.layers.linen import ELSAA
from elsaa_jax.layers.spec import ATTENTION_KINDS
from elsaa_jax.low_rank.performer import performer_attention, sample_projection
from elsaa_jax.low_rank.race import race_attention
from elsaa_jax.sparse.sort_lsh import sort_lsh_attention
from elsaa_jax.types import BranchOutput

try:
    __version__ = importlib.metadata.version("elsaa-jax")
except importlib.metadata.PackageNotFoundError:  # The source tree without an installation.
    __version__ = "0.0.0"

__all__ = [
    "ATTENTION_KINDS",
    "ELSAA",
    "BranchOutput",
    "ElsaaConfig",
    "FusionConfig",
    "RaceConfig",
    "SortLshConfig",
    "attention_fn",
    "elsaa_attention",
    "exact_attention",
    "fuse",
    "gray_rank",
    "hard_codes",
    "merge",
    "performer_attention",
    "race_attention",
    "sample_hashes",
    "sample_planes",
    "sample_projection",
    "soft_codes",
    "sort_lsh_attention",
    "sparse_multiplier",
]
