"""Soft codes inside a kernel: computed from rows and planes, never written to memory.

With u_p = 2 beta tanh(w_p . x), the code of corner r of a table is prod_p sigmoid(u_p) where bit p
of r is set and sigmoid(-u_p) where it is not. Its logarithm is a product of the rows (u, log
sigmoid(-u)) with matrices of zeros and ones, so that tensor cores form the codes, and the
derivative is a product with their transposes. What ends up in the exponent of the codes is computed
to float32 precision by several TF32 products: three for w . x, two where one factor is zeros and ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.configs import Settings
from pallas_kernels.launch import Array, Ref, div, dot, dot_ones, rem


class Tables(NamedTuple):
    """The hash tables of one ensemble; planes and features are padded to powers of two >= 16."""

    num_tables: int  # L
    num_bits: int  # P

    @property
    def num_planes(self) -> int:
        """L * P, padded."""
        return padded(self.num_tables * self.num_bits)

    @property
    def num_features(self) -> int:
        """L * 2**P, padded."""
        return padded(self.num_tables << self.num_bits)

    def of_table(self) -> Array:
        """(planes, features) zeros and ones: whether a plane belongs to the table of a feature."""
        return jnp.where(self._places()[0], 1.0, 0.0)

    def is_set(self) -> Array:
        """(planes, features) zeros and ones: whether it does, and its bit is set in the feature's corner."""
        same, bit, feature = self._places()
        return jnp.where(same & (((feature >> bit) & 1) == 1), 1.0, 0.0)

    def _places(self) -> tuple[Array, Array, Array]:
        shape = self.num_planes, self.num_features
        plane, feature = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        table, bit = div(plane, self.num_bits), rem(plane, self.num_bits)
        return (table == feature >> self.num_bits) & (plane < self.num_tables * self.num_bits), bit, feature


def padded(number: int) -> int:
    """The next power of two, at least 16: what a dot takes."""
    return max(16, 1 << (number - 1).bit_length())


class Codes(NamedTuple):
    """Soft codes of a tile of rows, and what their derivative needs.

    Attributes:
      codes: (C, features) float32, 0 in features that do not exist.
      rows: (C, H) float32.
      turn: (C, planes) float32, tanh(w . x).
    """

    codes: Array
    rows: Array
    turn: Array


class Hash(NamedTuple):
    """What makes codes. Planes are read anew at each use: kept in registers, they would spill.

    Attributes:
      planes: (1 or K, planes, H) float32, in memory.
      set_index: which of the planes.
      beta: sharpness.
    """

    planes: Ref
    set_index: Array | int
    beta: Array

    def read_planes(self) -> Array:
        """(planes, H)."""
        return self.planes[self.set_index, :, :]


def soft_codes(rows: Array, hashed: Hash, tables: Tables, settings: Settings) -> Codes:
    """The codes of rows (C, H)."""
    rows = rows.astype(jnp.float32)
    turn = jnp.tanh(dot(rows, hashed.read_planes(), settings=settings, transpose_y=True, precise=True))
    u = 2.0 * hashed.beta * turn
    # log sigmoid(-u), without overflow.
    log_zero = -(jnp.maximum(u, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(u))))
    log_codes = dot_ones(log_zero, tables.of_table(), settings=settings)
    log_codes = log_codes + dot_ones(u, tables.is_set(), settings=settings)
    codes = jnp.exp(log_codes)
    number = tables.num_tables << tables.num_bits
    if number < tables.num_features:
        codes = jnp.where(lax.broadcasted_iota(jnp.int32, codes.shape, 1) < number, codes, 0.0)
    return Codes(codes, rows, turn)


def derive(
    codes: Codes, d_codes: Array, hashed: Hash, tables: Tables, settings: Settings
) -> tuple[Array, Array, Array]:
    """d_rows (C, H), d_planes (planes, H) and d_beta (), from d_codes (C, features)."""
    slope = codes.codes * d_codes
    sigmoid = 1.0 / (1.0 + jnp.exp(-2.0 * hashed.beta * codes.turn))
    d_u = dot(slope, tables.is_set(), settings=settings, transpose_y=True)
    d_u = d_u - sigmoid * dot(slope, tables.of_table(), settings=settings, transpose_y=True)
    d_dots = d_u * (2.0 * hashed.beta) * (1.0 - codes.turn * codes.turn)
    d_rows = dot(d_dots, hashed.read_planes(), settings=settings)
    d_planes = dot(d_dots, codes.rows, settings=settings, transpose_x=True)
    return d_rows, d_planes, jnp.sum(d_u * 2.0 * codes.turn)
