"""The calls that the batteries share: sizes, masks and options of every function."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import elsaa_jax
from elsaa_jax import reference

HEAD_DIM = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a public function, as (query, key, value) -> BranchOutput."""

    function: str
    num_queries: int
    num_keys: int
    is_causal: bool = False
    mask: str | None = None  # "holes", "padding", "left" (the first three quarters), "row" (a whole row masked)
    batch: int = 2
    num_heads: int = 2
    num_kv_heads: int = 2
    planes: str = "shared"  # or "heads"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [self.function, f"{self.num_queries}x{self.num_keys}"]
        parts += ["causal"] * self.is_causal + [self.mask or ""] + [f"{k}={v}" for k, v in self.options]
        parts += [f"{self.num_heads}of{self.num_kv_heads}" if self.num_heads != self.num_kv_heads else ""]
        return "-".join(x for x in parts if x)

    def arrays(self, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
        rng = np.random.default_rng(self.num_queries * 7919 + self.num_keys)
        query = rng.normal(size=(self.batch, self.num_queries, self.num_heads, HEAD_DIM))
        keys = rng.normal(size=(2, self.batch, self.num_keys, self.num_kv_heads, HEAD_DIM))
        return tuple(jnp.asarray(x, dtype) for x in (query, *keys))

    def key_mask(self) -> jax.Array | None:
        shape = (self.batch, self.num_keys)
        if self.mask is None:
            return None
        if self.mask == "padding":
            lengths = np.linspace(self.num_keys, self.num_keys // 3 + 1, self.batch).astype(int)
            return jnp.asarray(np.arange(self.num_keys)[None, :] < lengths[:, None])
        if self.mask == "left":
            return jnp.asarray(np.broadcast_to(np.arange(self.num_keys) >= self.num_keys * 3 // 4, shape))
        mask = np.random.default_rng(5).random(shape) < 0.7
        if self.mask == "row":
            mask[-1] = False
        return jnp.asarray(mask)

    def extra(self) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
        """Further arguments: planes or projection, and keywords."""
        options: dict[str, Any] = {"is_causal": self.is_causal, "key_mask": self.key_mask(), **dict(self.options)}
        rng = jax.random.key(3)
        heads = (self.num_kv_heads,) if self.planes == "heads" else ()
        if self.function == "race_attention":
            tables = 3 * options.get("num_ensembles", 1)
            return (elsaa_jax.sample_planes(rng, (*heads, tables, 3, HEAD_DIM)) / 2,), options
        if self.function == "sort_lsh_attention":
            if self.mask is not None and self.num_queries == self.num_keys:
                options["query_mask"] = options["key_mask"]
            return (elsaa_jax.sample_planes(rng, (*heads, 4, HEAD_DIM)),), options
        if self.function == "performer_attention":
            return (elsaa_jax.sample_projection(rng, 24, HEAD_DIM),), options
        return (), options

    def run(self, query, key, value, implementation=None):
        extra, options = self.extra()
        if self.function != "performer_attention":
            options["implementation"] = implementation
        return getattr(elsaa_jax, self.function)(query, key, value, *extra, **options)

    def run_reference(self, query, key, value, **more):
        extra, options = self.extra()
        return getattr(reference, self.function)(query, key, value, *extra, **options, **more)


def options(**kwargs: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(kwargs.items())


SPARSE = options(block_size=16)
CAUSAL_SPARSE = options(block_size=8, min_length=24)

CASES = [
    # Every length, plainly.
    *(Case("exact_attention", n, n, causal) for n in (1, 2, 7, 65, 1000) for causal in (False, True)),
    *(Case("race_attention", n, n, causal) for n in (1, 2, 7, 65, 1000) for causal in (False, True)),
    *(Case("performer_attention", n, n, causal) for n in (1, 7, 65, 1000) for causal in (False, True)),
    *(Case("sort_lsh_attention", n, n, options=SPARSE) for n in (1, 2, 7, 63, 64, 65, 100, 1000)),
    *(Case("sort_lsh_attention", n, n, True, options=CAUSAL_SPARSE) for n in (1, 2, 7, 63, 64, 65, 100, 1000)),
    *(Case(f, 4096, 4096, c, batch=1, options=o) for f, c, o in (
        ("exact_attention", True, ()),
        ("race_attention", False, ()),
        ("race_attention", True, ()),
        ("sort_lsh_attention", False, options(block_size=64)),
        ("sort_lsh_attention", True, options(block_size=64, min_length=256)),
    )),
    # Other numbers of keys than queries, grouped heads, masks.
    *(Case(f, 30, 100, c, m, num_heads=4, planes=p) for f, p in (
        ("exact_attention", "shared"), ("race_attention", "heads"), ("performer_attention", "shared"),
    ) for c in (False, True) for m in ("holes", "row")),
    *(Case("sort_lsh_attention", t, s, m == "none", None if m == "none" else m, num_heads=4, planes="heads",
           options=options(block_size=16, pairing=p))
      for t, s, m in ((30, 100, "row"), (100, 30, "holes"), (30, 100, "none")) for p in ("rank", "bucket")),
    *(Case("sort_lsh_attention", 100, 100, c, m, num_heads=4, planes="heads",
           options=options(block_size=8, pairing=p, min_length=20 * c, num_neighbors=r))
      for c in (False, True) for p in ("rank", "bucket") for m, r in ((None, 1), ("row", 0))),
    # A base length that blocks do not divide, queries that touch one stretch, blocks of one key.
    Case("sort_lsh_attention", 1, 77, True, options=CAUSAL_SPARSE),
    Case("sort_lsh_attention", 33, 77, True, "padding", options=options(block_size=5, min_length=7, num_neighbors=1)),
    Case("sort_lsh_attention", 50, 50, True, options=options(block_size=1)),
    Case("sort_lsh_attention", 50, 50, options=options(min_length=64)),
    # Halves without a key before halves with keys.
    *(Case("sort_lsh_attention", t, 90, True, "left", options=options(block_size=4, min_length=8, pairing=p))
      for t, p in ((90, "rank"), (89, "rank"), (89, "bucket"))),
    # Ensembles, other sharpness, chunks that are longer than the sequence.
    Case("race_attention", 100, 100, options=options(num_ensembles=2, beta=3.0)),
    Case("race_attention", 100, 100, True, "padding", options=options(num_ensembles=2, chunk_size=16, eps=0.1)),
    Case("race_attention", 5, 40, True, options=options(chunk_size=16)),
]  # fmt: skip
