"""Arguments of block attention: the plan, which says who attends to whom, the scale and the causal mask.

Both launchers take them: `block_attention`, which uses Pallas, and `triton_route`, which uses jax-triton.
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.launch import Array, div, rem


class Plan(NamedTuple):
    """Index arrays that say which queries attend to which keys. All arrays are int32.

    A row index at or past the end of the queries or keys is padding: reading it gives zeros, writing it does nothing.

    Attributes:
      query_rows: Rows of the flattened queries (B*T*N, H) in each tile, (A, t); t is a power of two >= 16.
      key_rows: Rows of the flattened keys (B*S*K, H) in each block, (C, s); s is a power of two >= 16.
      first_block: First block that each tile attends to, (A,).
      end_block: One past the last block that each tile attends to, (A,).
      first_tile: First tile that attends to each block, (C,).
      end_tile: One past the last tile that attends to each block, (C,). The two ranges describe the same pairs: a tile
        outside the range of a block has no query that attends to that block.
    """

    query_rows: Array
    key_rows: Array
    first_block: Array
    end_block: Array
    first_tile: Array
    end_tile: Array


class Causal(NamedTuple):
    """Sizes from which a kernel derives the causal mask. Query i of T is at position S - T + i.

    A query sees the keys up to its own position.

    Attributes:
      num_queries: Number of query positions, T.
      num_keys: Number of key positions, S.
      num_heads: Number of query heads, N.
      num_kv_heads: Number of key/value heads, K.
    """

    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int

    def last_row(self, rows: Array) -> Array:
        """Returns the last key row that each query row sees: the key at the query's own position and head."""
        length, heads, kv_heads = self.num_queries, self.num_heads, self.num_kv_heads
        batch, position, head = div(rows, length * heads), rem(div(rows, heads), length), rem(rows, heads)
        position = position + (self.num_keys - length)
        return (batch * self.num_keys + position) * kv_heads + div(head, heads // kv_heads)


class Geometry(NamedTuple):
    """Scale and causal mask of a block attention call. Hashable, so it can be a static argument of `jit`.

    Attributes:
      scale: Factor of the logits.
      causal: Sizes of the causal mask, or None if every tile sees all keys of its blocks.
    """

    scale: float
    causal: Causal | None
