"""The base of the causal split: exact attention within stretches of N0 tokens, aligned at 0."""

from __future__ import annotations

from typing import NamedTuple

from jax import lax

from elsaa_jax.arrays.chunks import largest_divisor, pad_axis
from elsaa_jax.blocks import exact
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

        def attend(query, key, value, key_mask):
            geometry = self._geometry(scale, key_mask)
            rows = exact.forward(geometry, *exact.to_rows(query, key, value, key_mask))
            return tuple(exact.from_query_rows(x, query.shape[0]) for x in rows)

        out, log_mass = self._map(attend, self._split_queries(query), *self._split_all_keys(key, value, key_mask))
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

        def derive(query, key, value, key_mask, *of_queries):
            geometry, batch = self._geometry(scale, key_mask), query.shape[0]
            rows = (
                *exact.to_rows(query, key, value, key_mask),
                *(exact.to_query_rows(x, key.shape[2]) for x in of_queries),
            )
            d_query, *d_keys = exact.backward(geometry, *rows)
            return exact.from_query_rows(d_query, batch), *(exact.from_key_rows(x, batch) for x in d_keys)

        # Queries that pad the first and the last stretch have weights, but no cotangent.
        query, *of_queries = (self._split_queries(x) for x in (query, log_mass, d_out, shift))
        d_query, *d_keys = self._map(derive, query, *self._split_all_keys(key, value, key_mask), *of_queries)
        d_key, d_value = (self._join_keys(x) for x in d_keys)
        return self._join_queries(d_query), d_key, d_value

    def count_keys(self, query: Array, key_mask: Array | None) -> Array:
        """How many keys of its stretch each query sees: (B, T, N) float32."""
        query = self._split_queries(query)
        mask = None if key_mask is None else self._split_keys(key_mask)
        num_keys = self.num_keys - self.first if self.number == 1 else self.base
        return self._join_queries(exact.count_keys(query, num_keys, True, mask))

    def _geometry(self, scale: float, key_mask: Array | None) -> exact.Geometry:
        num_queries, num_keys = (self.num_queries, self.num_keys - self.first) if self.number == 1 else (self.base,) * 2
        return exact.make_geometry(num_queries, num_keys, True, scale, key_mask is not None)

    def _map(self, function, *arrays):
        """Applies `function` to a few stretches at a time, so that each is put in order while it is in the cache."""
        number, num_heads = arrays[0].shape[0], arrays[0].shape[2]
        at_a_time = largest_divisor(number, exact.SCORES_AT_A_TIME // (num_heads * self.base**2))
        if at_a_time == number:
            return function(*arrays)

        def group(x):
            # Stretches and tokens are one axis: XLA copies the input of a loop that has an axis of size 1.
            return None if x is None else x.reshape(-1, at_a_time * x.shape[1], *x.shape[2:])

        def some(xs):
            xs = (None if x is None else x.reshape(at_a_time, -1, *x.shape[1:]) for x in xs)
            return tuple(x.reshape(-1, *x.shape[2:]) for x in function(*xs))

        results = lax.map(some, tuple(group(x) for x in arrays))
        return tuple(x.reshape(number, -1, *x.shape[2:]) for x in results)

    def _split_all_keys(self, key: Array, value: Array, key_mask: Array | None) -> list[Array | None]:
        return [None if x is None else self._split_keys(x) for x in (key, value, key_mask)]

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
