"""Static facts and arrays of a call of RACE."""

from __future__ import annotations

from typing import NamedTuple

from elsaa_jax.dispatch import Route
from elsaa_jax.types import Array, CallFacts
from pallas_kernels.fusion import FusedKind


class RaceCall(NamedTuple):
    """Sizes and rules of one call. Hashable, so it can be a static argument of `jit`.

    Attributes:
      facts: Sizes of the arrays and causality.
      num_tables: Tables of one ensemble, L.
      num_bits: Bits of a table, P.
      num_ensembles: M.
      causal_chunk: Tokens of a chunk of the causal form, or None if the call is not causal.
      route: Implementation that runs.
      fusion: Kind of fusion that the readout applies, or None for the low-rank branch alone.
      stop_gradient_mass: Whether the masses in the fusion are constants to the gradient.
    """

    facts: CallFacts
    num_tables: int
    num_bits: int
    num_ensembles: int
    causal_chunk: int | None
    route: Route
    fusion: FusedKind | None = None
    stop_gradient_mass: bool = True


class RaceArrays(NamedTuple):
    """Arrays of one call.

    Attributes:
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H), 0 where masked.
      value: Values, (B, S, K, H), 0 where masked.
      planes: Hash planes, (M*L, P, H) or (K, M*L, P, H).
      beta: Sharpness of the soft codes, a float32 scalar.
      eps: Floor of the denominator, a float32 scalar.
      key_mask: Keys that take part, (B, S) bool, or None.
    """

    query: Array
    key: Array
    value: Array
    planes: Array
    beta: Array
    eps: Array
    key_mask: Array | None


class State(NamedTuple):
    """Bucket sums that queries read.

    In the causal form they are those of all chunks before each chunk with a query. Otherwise they are those of all
    keys and there is no axis of chunks.

    Attributes:
      mass: Sum of the soft codes of each bucket, (*chunks, R, M, F).
      values: Sum of code times value of each bucket, (*chunks, R, M, F, H).
    """

    mass: Array
    values: Array
