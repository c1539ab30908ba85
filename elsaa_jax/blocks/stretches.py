"""The geometry of stretches: N0 consecutive tokens within which attention is exact.

Exact attention is one stretch that holds all keys. The base of the causal split is a row of stretches, aligned at
position 0. Both implementations, XLA and kernels, cut their arrays by the methods of `Stretches`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp

from elsaa_jax.arrays.chunks import pad_axis
from elsaa_jax.types import Array

Side: TypeAlias = Literal["queries", "keys"]


class Stretches(NamedTuple):
    """The stretches that hold a query. Hashable, so it can be a static argument of `jit`.

    Arrays (B, T, ...) are cut into (B * number, queries_each, ...). A single stretch is not padded: its T queries
    stand at the end of its keys.

    Attributes:
      base: N0, tokens of a stretch.
      num_queries: T.
      num_keys: S.
      is_causal: Whether a query attends to its past only, and the T queries are the last of the S positions.
    """

    base: int
    num_queries: int
    num_keys: int
    is_causal: bool

    @property
    def first(self) -> int:
        """Position at which the first stretch with a query begins."""
        return (self.num_keys - self.num_queries) // self.base * self.base if self.is_causal else 0

    @property
    def number(self) -> int:
        """Number of stretches that hold a query."""
        return -(-(self.num_keys - self.first) // self.base)

    @property
    def queries_each(self) -> int:
        """Queries of one stretch, padding included."""
        return self.num_queries if self.number == 1 else self.base

    @property
    def keys_each(self) -> int:
        """Keys of one stretch, padding included."""
        return self.num_keys - self.first if self.number == 1 else self.base

    def split(self, x: Array, side: Side, fill: float = 0) -> Array:
        """Cuts (B, T or S, ...) into (B * number, queries or keys of each, ...), padded with `fill`.

        Keys before `first` are left out.
        """
        x = x[:, self.first :] if side == "keys" else x
        if self.number == 1:
            return x
        before = self.num_keys - self.num_queries - self.first if side == "queries" else 0
        x = pad_axis(x, 1, before, self.number * self.base - before - x.shape[1], fill)
        return x.reshape(-1, self.base, *x.shape[2:])

    def join(self, x: Array, side: Side) -> Array:
        """Undoes `split`, with 0 for the keys before `first`."""
        if self.number > 1:
            before = self.num_keys - self.num_queries - self.first if side == "queries" else 0
            length = self.num_queries if side == "queries" else self.num_keys - self.first
            x = x.reshape(-1, self.number * self.base, *x.shape[2:])[:, before : before + length]
        return pad_axis(x, 1, self.first, 0) if side == "keys" else x

    def count_keys(self, query: Array, key_mask: Array | None) -> Array:
        """Counts the keys of its stretch that each query attends to, (B, T, N) float32."""
        valid = jnp.ones((query.shape[0], self.num_keys), bool) if key_mask is None else key_mask
        count = jnp.cumsum(self.split(valid, "keys"), axis=1, dtype=jnp.int32)
        if self.is_causal:
            count = count[:, self.keys_each - self.queries_each :]
        else:
            count = jnp.broadcast_to(count[:, -1:], (len(count), self.queries_each))
        return jnp.broadcast_to(self.join(count, "queries")[:, :, None], query.shape[:3]).astype(jnp.float32)
