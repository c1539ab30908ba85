"""The base of the causal split: exact attention within stretches of N0 tokens, aligned at 0."""

from __future__ import annotations

from typing import NamedTuple

from elsaa_jax import exact
from elsaa_jax.chunks import pad_axis
from elsaa_jax.types import Array


class Stretches(NamedTuple):
    """The stretches that hold one of the T queries, which are the last of S positions.

    They become batch entries, (B, T, ...) <-> (B * number, N0, ...); where there is but one, it is
    left as it is, with T queries at the end of the keys of the stretch.
    """

    base: int  # N0
    num_queries: int  # T
    num_keys: int  # S

    @property
    def first(self) -> int:
        """Where the first stretch with a query begins."""
        return self.first_query // self.base * self.base

    @property
    def first_query(self) -> int:
        """The position of the first query."""
        return self.num_keys - self.num_queries

    @property
    def number(self) -> int:
        """How many stretches hold a query."""
        return -(-(self.num_keys - self.first) // self.base)

    def forward(
        self, scale: float, query: Array, key: Array, value: Array, key_mask: Array | None
    ) -> tuple[Array, Array]:
        """out (B, T, N, H) and log_mass (B, T, N) within the stretches, float32."""
        geometry, rows = self._rows(scale, query, key, value, key_mask)
        batch = query.shape[0] * self.number
        out, log_mass = (exact.from_query_rows(x, batch) for x in exact.forward(geometry, *rows))
        return self._join_queries(out), self._join_queries(log_mass)

    def backward(
        self,
        scale: float,
        query: Array,
        key: Array,
        value: Array,
        key_mask: Array | None,
        log_mass: Array,
        d_out: Array,
        shift: Array,
    ) -> tuple[Array, Array, Array]:
        """d_query, d_key and d_value, float32; see `blocks.backward`."""
        geometry, rows = self._rows(scale, query, key, value, key_mask)
        batch, num_kv_heads = query.shape[0] * self.number, key.shape[2]
        # Queries that pad the first and the last stretch have weights, but no cotangent.
        cotangents = (exact.to_query_rows(self._split_queries(x), num_kv_heads) for x in (log_mass, d_out, shift))
        d_query, d_key, d_value = exact.backward(geometry, *rows, *cotangents)
        return (
            self._join_queries(exact.from_query_rows(d_query, batch)),
            self._join_keys(exact.from_key_rows(d_key, batch)),
            self._join_keys(exact.from_key_rows(d_value, batch)),
        )

    def count_keys(self, query: Array, key_mask: Array | None) -> Array:
        """How many keys of its stretch each query sees: (B, T, N) float32."""
        query = self._split_queries(query)
        mask = None if key_mask is None else self._split_keys(key_mask)
        num_keys = self.num_keys - self.first if self.number == 1 else self.base
        return self._join_queries(exact.count_keys(query, num_keys, True, mask))

    def _rows(self, scale: float, query: Array, key: Array, value: Array, key_mask: Array | None):
        query, key, value = self._split_queries(query), self._split_keys(key), self._split_keys(value)
        mask = None if key_mask is None else self._split_keys(key_mask)
        geometry = exact.make_geometry(query.shape[1], key.shape[1], True, scale, mask is not None)
        return geometry, exact.to_rows(query, key, value, mask)

    def _split_queries(self, x: Array) -> Array:
        return self._split(x, self.first_query - self.first)

    def _split_keys(self, x: Array) -> Array:
        return self._split(x[:, self.first :], 0)

    def _join_queries(self, x: Array) -> Array:
        return self._join(x, self.first_query - self.first, self.num_queries)

    def _join_keys(self, x: Array) -> Array:
        return pad_axis(self._join(x, 0, self.num_keys - self.first), 1, self.first, 0)

    def _split(self, x: Array, before: int) -> Array:
        if self.number == 1:
            return x
        x = pad_axis(x, 1, before, self.number * self.base - before - x.shape[1])
        return x.reshape(-1, self.base, *x.shape[2:])

    def _join(self, x: Array, before: int, length: int) -> Array:
        if self.number == 1:
            return x
        return x.reshape(-1, self.number * self.base, *x.shape[2:])[:, before : before + length]
