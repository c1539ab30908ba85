"""The geometry of stretches: N0 consecutive tokens within which attention is exact.

Exact attention is one stretch that holds all keys. The base of the causal split is a row of stretches, aligned at
position 0. Both implementations, XLA and kernels, cut their arrays by the methods of `Stretches`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from elsaa_jax.arrays.chunks import pad_axis
from elsaa_jax.types import Array


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

    def split_queries(self, x: Array, fill: float = 0) -> Array:
        """Cuts (B, T, ...) into (B * number, queries_each, ...), padded with `fill`."""
        return self._split(x, self._before, fill)

    def split_keys(self, x: Array, fill: float = 0) -> Array:
        """Cuts (B, S, ...) into (B * number, keys_each, ...), padded with `fill`; keys before `first` are left out."""
        return self._split(x[:, self.first :], 0, fill)

    def join_queries(self, x: Array) -> Array:
        """Undoes `split_queries`."""
        return self._join(x, self._before, self.num_queries)

    def join_keys(self, x: Array) -> Array:
        """Undoes `split_keys`, with 0 for the keys before `first`."""
        return pad_axis(self._join(x, 0, self.num_keys - self.first), 1, self.first, 0)

    def count_keys(self, query: Array, key_mask: Array | None) -> Array:
        """Counts the keys of its stretch that each query attends to, (B, T, N) float32."""
        valid = jnp.ones((query.shape[0], self.num_keys), bool) if key_mask is None else key_mask
        count = jnp.cumsum(self.split_keys(valid), axis=1, dtype=jnp.int32)
        if self.is_causal:
            count = count[:, self.keys_each - self.queries_each :]
        else:
            count = jnp.broadcast_to(count[:, -1:], (len(count), self.queries_each))
        return jnp.broadcast_to(self.join_queries(count)[:, :, None], query.shape[:3]).astype(jnp.float32)

    @property
    def _before(self) -> int:
        """Padding before the first query, if there are several stretches."""
        return self.num_keys - self.num_queries - self.first

    def _split(self, x: Array, before: int, fill: float) -> Array:
        if self.number == 1:
            return x
        x = pad_axis(x, 1, before, self.number * self.base - before - x.shape[1], fill)
        return x.reshape(-1, self.base, *x.shape[2:])

    def _join(self, x: Array, before: int, length: int) -> Array:
        if self.number == 1:
            return x
        return x.reshape(-1, self.number * self.base, *x.shape[2:])[:, before : before + length]
