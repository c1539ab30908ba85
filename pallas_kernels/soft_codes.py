"""Soft codes inside a kernel: computed from rows and hash planes, never written to memory.

With u_p = 2 beta tanh(w_p . x), the code of corner r of a table is the product over its planes p of sigmoid(u_p) where
bit p of r is set and sigmoid(-u_p) where it is not. The logarithm of the code is a product of the rows (u, log
sigmoid(-u)) with matrices of zeros and ones, so tensor cores form the codes. The derivative is a product with the
transposed matrices. Everything in the exponent of the codes is computed to float32 precision by several TF32 products:
three for w . x, two where one factor consists of zeros and ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.configs import Settings
from pallas_kernels.launch import Array, Ref, div, dot, dot_ones, ones_where, rem

# Factor of all soft codes, and of Den, the sum of products of two of them. At a large beta Den can be as small as
# exp(-100): without the factor it would underflow in float32. A larger one would let small cotangents of Num / Den
# underflow.
CODE_SCALE = 2.0**20
DEN_SCALE = CODE_SCALE**2


class Tables(NamedTuple):
    """The hash tables of one ensemble. Planes and features are padded to powers of two >= 16.

    Attributes:
      num_tables: Number of hash tables, L.
      num_bits: Number of planes of each table, P.
    """

    num_tables: int
    num_bits: int

    @property
    def num_planes(self) -> int:
        """Number of planes L * P, padded."""
        return padded(self.num_tables * self.num_bits)

    @property
    def num_features(self) -> int:
        """Number of soft buckets L * 2**P, padded."""
        return padded(self.num_tables << self.num_bits)

    def of_table(self) -> Array:
        """Returns a (planes, features) matrix: 1 where a plane belongs to the table of a feature, else 0."""
        return ones_where(self._places()[0])

    def is_set(self) -> Array:
        """Returns the same matrix with 1 only where the bit of the plane is set in the corner of the feature."""
        same, bit, feature = self._places()
        return ones_where(same & (((feature >> bit) & 1) == 1))

    def _places(self) -> tuple[Array, Array, Array]:
        """Returns, for every (plane, feature): whether they share a table, the bit of the plane, and the feature."""
        shape = self.num_planes, self.num_features
        plane, feature = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        table, bit = div(plane, self.num_bits), rem(plane, self.num_bits)
        return (table == feature >> self.num_bits) & (plane < self.num_tables * self.num_bits), bit, feature


def padded(number: int) -> int:
    """Returns the next power of two that is at least 16, the smallest size that a dot takes."""
    return max(16, 1 << (number - 1).bit_length())


class Codes(NamedTuple):
    """Soft codes of a tile of rows, with the intermediate values that the derivative needs.

    Attributes:
      codes: Soft codes, (C, features) float32; 0 in padding features.
      rows: Rows that were hashed, (C, H) float32.
      turn: tanh(w . x) for every plane w, (C, planes) float32.
    """

    codes: Array
    rows: Array
    turn: Array


class Hash(NamedTuple):
    """Hash planes and sharpness. Each use reads the planes again, because keeping them in registers would spill.

    Attributes:
      planes: Reference to the planes in memory, (1 or K, planes, H) float32.
      set_index: Index of the set of planes to use, on the first axis.
      beta: Sharpness of the codes.
    """

    planes: Ref
    set_index: Array | int
    beta: Array

    def read_planes(self) -> Array:
        """Reads the planes, (planes, H)."""
        return self.planes[self.set_index, :, :]


def soft_codes(rows: Array, hashed: Hash, tables: Tables, settings: Settings) -> Codes:
    """Computes the soft codes of rows (C, H)."""
    rows = rows.astype(jnp.float32)
    turn = jnp.tanh(dot(rows, hashed.read_planes(), settings=settings, transpose_y=True, precise=True))
    u = 2.0 * hashed.beta * turn
    # This form of log sigmoid(-u) cannot overflow.
    log_zero = -(jnp.maximum(u, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(u))))
    log_codes = dot_ones(log_zero, tables.of_table(), settings=settings)
    log_codes = log_codes + dot_ones(u, tables.is_set(), settings=settings)
    codes = jnp.exp(log_codes + math.log(CODE_SCALE))
    number = tables.num_tables << tables.num_bits
    if number < tables.num_features:
        codes = jnp.where(lax.broadcasted_iota(jnp.int32, codes.shape, 1) < number, codes, 0.0)
    return Codes(codes, rows, turn)


def derive(
    codes: Codes, d_codes: Array, hashed: Hash, tables: Tables, settings: Settings
) -> tuple[Array, Array, Array]:
    """Computes the gradients of rows (C, H), planes (planes, H) and beta () from that of the codes (C, features)."""
    slope = codes.codes * d_codes
    sigmoid = 1.0 / (1.0 + jnp.exp(-2.0 * hashed.beta * codes.turn))
    d_u = dot(slope, tables.is_set(), settings=settings, transpose_y=True)
    d_u = d_u - sigmoid * dot(slope, tables.of_table(), settings=settings, transpose_y=True)
    d_dots = d_u * (2.0 * hashed.beta) * (1.0 - codes.turn * codes.turn)
    d_rows = dot(d_dots, hashed.read_planes(), settings=settings)
    d_planes = dot(d_dots, codes.rows, settings=settings, transpose_x=True)
    return d_rows, d_planes, jnp.sum(d_u * 2.0 * codes.turn)
