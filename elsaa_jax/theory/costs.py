"""Formulas for the costs beside the interactions: parameters, hashing, sorting, memory, and keys read by one query.

`elsaa_jax.theory.programs` has a count for each of them, taken from the library's own layers and programs.
"""

from __future__ import annotations

from typing import NamedTuple

from elsaa_jax.checks import check_int
from elsaa_jax.config import ElsaaConfig, RaceConfig, SortLshConfig
from elsaa_jax.layers.spec import AttentionSpec
from elsaa_jax.sparse.pairing import TILE_SIZE
from elsaa_jax.types import AttentionKind

FLOAT_BYTES = 4


class Parameters(NamedTuple):
    """Learned numbers of one attention layer.

    Attributes:
      projections: Kernels and biases of query, key, value and output: those of any attention layer.
      gate: Gate network with two outputs.
      lam: Scalar or query-dependent lambda.
      beta: Sharpness of the soft codes.
      convolutions: Taps of the short convolutions.
    """

    projections: int
    gate: int
    lam: int
    beta: int
    convolutions: int

    @property
    def extra(self) -> int:
        """Parameters beside the projections."""
        return self.gate + self.lam + self.beta + self.convolutions

    @property
    def overhead(self) -> float:
        """Extra parameters as a share of the projections."""
        return self.extra / self.projections


def layer_parameters(
    features: int,
    num_heads: int,
    config: ElsaaConfig,
    *,
    num_kv_heads: int | None = None,
    use_bias: bool = True,
    attention: AttentionKind = "elsaa",
) -> Parameters:
    """Computes the number of parameters of an `ELSAA` layer with D input, inner and output features.

    Projections: 2 D^2 + 2 D K H, and 2 D + 2 K H biases. Gate: g (D + 1) + 2 (g + 1), with H instead of D for
    `gate_input="query"`. Lambda: 1 as a scalar; N H + 2 N if it depends on the query; 0 if fixed. Beta: 1.
    Convolutions: taps times (N + 2 K) H.

    Args:
      features: Features D of the input, of all heads together, and of the output.
      num_heads: Number of query heads, N, which divides D.
      config: Configuration of the layer.
      num_kv_heads: Number of key/value heads, K. None means N.
      use_bias: Whether the projections have biases.
      attention: Name of the attention.

    Example:
      >>> from elsaa_jax import ElsaaConfig
      >>> from elsaa_jax.theory import complexity
      >>> parameters = complexity.layer_parameters(256, 4, ElsaaConfig())
      >>> parameters.gate, parameters.lam, parameters.beta, round(parameters.overhead, 3)
      (16578, 1, 1, 0.063)
    """
    check_int("features", features, 1)
    check_int("num_heads", num_heads, 1)
    if features % num_heads:
        raise ValueError(f"features is {features}; it must be a multiple of num_heads = {num_heads}")
    features, heads = int(features), int(num_heads)
    kv_heads = heads if num_kv_heads is None else int(num_kv_heads)
    dim = features // heads
    spec = AttentionSpec(attention, config, heads, kv_heads, dim, is_causal=False, implementation=None)
    projections = 2 * features * features + 2 * features * kv_heads * dim
    if use_bias:
        projections += 2 * features + 2 * kv_heads * dim
    hidden, gate_input = config.fusion.gate_hidden, dim if config.fusion.gate_input == "query" else features
    lam = {"scalar": 1, "query": heads * dim + 2 * heads}.get(spec.lambda_kind or "fixed", 0)
    return Parameters(
        projections=projections,
        gate=hidden * (gate_input + 1) + 2 * (hidden + 1) if spec.has_gate else 0,
        lam=lam,
        beta=1 if spec.learns_beta else 0,
        convolutions=config.short_conv * (heads + 2 * kv_heads) * dim,
    )


class Hashing(NamedTuple):
    """Work of hashing for one head.

    Attributes:
      hard_codes: Multiply-adds of the sparse branch's planes, (T + S) P H.
      soft_planes: Multiply-adds of RACE's planes, (T + S) M L P H.
      soft_corners: Multiply-adds from RACE's planes to its soft codes, (T + S) M L P 2^P.
      sorted_tokens: Tokens that the sparse branch sorts, T + S. Sorting n tokens takes about n log2 n comparisons.
    """

    hard_codes: int
    soft_planes: int
    soft_corners: int
    sorted_tokens: int


def hashing_work(num_queries: int, num_keys: int, head_dim: int, race: RaceConfig, sparse: SortLshConfig) -> Hashing:
    """Computes the work of hashing and sorting for one head.

    It is the same for causal attention. Each level of the causal split is a stable partition of the one order, in
    linear time, and no level sorts again. The paper's recursion sorts at each of its log2(N / N0) levels.

    Args:
      num_queries: Number of queries, T.
      num_keys: Number of keys, S.
      head_dim: Head dimension, H.
      race: Low-rank branch.
      sparse: Sparse branch.

    Example:
      >>> from elsaa_jax import RaceConfig, SortLshConfig
      >>> from elsaa_jax.theory import complexity
      >>> complexity.hashing_work(1000, 1000, 64, RaceConfig(num_tables=4, num_bits=4), SortLshConfig(num_bits=5))
      Hashing(hard_codes=640000, soft_planes=2048000, soft_corners=512000, sorted_tokens=2000)
    """
    check_int("num_queries", num_queries, 1)
    check_int("num_keys", num_keys, 1)
    check_int("head_dim", head_dim, 1)
    tokens, head_dim = int(num_queries) + int(num_keys), int(head_dim)
    return Hashing(
        hard_codes=tokens * sparse.num_bits * head_dim,
        soft_planes=tokens * race.total_planes * head_dim,
        soft_corners=tokens * race.total_planes * 2**race.num_bits,
        sorted_tokens=tokens,
    )


class Memory(NamedTuple):
    """Bytes that the forward pass keeps for the backward pass, for one example.

    Attributes:
      inputs: Queries, keys and values.
      sparse_rows: Output and log-mass of the sparse branch.
      sparse_plan: Integers that say which tile of queries reads which block of keys.
      race_state: Bucket masses and bucket values.
      race_rows: Masses and weights of the low-rank branch, at most four floats for each query and head.
    """

    inputs: int
    sparse_rows: int
    sparse_plan: int
    race_state: int
    race_rows: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)


def kept_memory(
    length: int,
    head_dim: int,
    config: ElsaaConfig,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    is_causal: bool = False,
    itemsize: int = FLOAT_BYTES,
) -> Memory:
    """Computes an upper bound of the bytes that self-attention keeps for its backward pass; planes are not counted.

    - Rows: n N (H itemsize + 4) for the sparse branch, and 16 n N for the low-rank one.
    - State: 4 F (H + 1) K for F = M L 2^P buckets, times ceil(n / C) chunks if causal.
    - Plan by rank, non-causal: 4 bytes for each row of the padded, sorted queries and keys, 4 ceil(n / s) s (N + K).
    - Plan of one level of the causal split, or of bucket pairing: 4 K (A (t + w) + Z s). Z is the number of blocks of s
      keys, A <= Q / t + Z the number of tiles of t queries, and w the number of blocks that a tile reads.

    No array of n s scores or n F soft codes is kept. The paper's Theta(N (s + L 2^P)) is therefore an upper bound.

    Args:
      length: Number of queries and keys, n.
      head_dim: Head dimension, H.
      config: Configuration of the attention; its `min_length` is a number.
      num_heads: Number of query heads, N.
      num_kv_heads: Number of key/value heads, K. None means N.
      is_causal: Whether attention is causal.
      itemsize: Bytes of one element of the queries.

    Example:
      >>> from elsaa_jax import ElsaaConfig
      >>> from elsaa_jax.theory import complexity
      >>> complexity.kept_memory(1024, 64, ElsaaConfig()).race_state  # 4 tables of 4 bits: 64 buckets of 65 floats
      16640
    """
    check_int("length", length, 1)
    check_int("head_dim", head_dim, 1)
    check_int("num_heads", num_heads, 1)
    n, dim, heads = int(length), int(head_dim), int(num_heads)
    kv_heads = heads if num_kv_heads is None else int(num_kv_heads)
    race = config.race
    chunks = -(-n // min(race.chunk_size, n)) if is_causal else 1
    buckets = race.total_tables * 2**race.num_bits
    return Memory(
        inputs=n * (heads + 2 * kv_heads) * dim * itemsize,
        sparse_rows=n * heads * (dim * itemsize + FLOAT_BYTES),
        sparse_plan=4 * kv_heads * _plan_integers(n, heads // kv_heads, config.sparse, is_causal),
        race_state=FLOAT_BYTES * chunks * kv_heads * buckets * (dim + 1),
        race_rows=4 * FLOAT_BYTES * n * heads,
    )


def _plan_integers(n: int, group: int, config: SortLshConfig, is_causal: bool) -> int:
    """Counts the integers of the plan for one key/value head, an upper bound where tiles are filled by index."""
    if config.min_length == "auto":
        raise ValueError("SortLshConfig.min_length is 'auto'; the memory needs a number")
    base = int(config.min_length or config.block_size) if is_causal else int(config.min_length)
    if n <= base:
        return 0
    size, width = config.block_size, 2 * config.num_neighbors + 1
    if not is_causal and config.pairing in (None, "rank"):
        padded = -(-n // size) * size
        return padded * (group + 1) + (padded // size * width if config.num_neighbors else 0)
    levels = ((n - 1) // base).bit_length() if is_causal else 1
    if is_causal:
        halves = [base << i for i in range(levels)]
        blocks = max(-(-n // (2 * half)) * -(-half // size) for half in halves)
        queries = max(sum(min(half, n - start) for start in range(half, n, 2 * half)) for half in halves) * group
    else:
        blocks, queries = -(-n // size), n * group
    tile = min(TILE_SIZE, queries)
    tiles = queries // tile + min(blocks, queries)
    return levels * (tiles * (tile + width) + blocks * size)


def keys_read(position: int, config: SortLshConfig) -> int:
    """Computes how many keys the sparse branch reads for one causal query, which is the work of a decode step.

    The query reads its stretch up to itself, and one block with k neighbours on each side at each level of the causal
    split at which it stands in a second half. So it reads (p mod N0) + 1 keys, and min((2 k + 1) s, m) for each
    m = N0, 2 N0, 4 N0, ... <= p with odd floor(p / m). That is at most N0 + (2 k + 1) s log2(N / N0) keys. The count is
    exact without neighbours if the block size divides N0, and an upper bound otherwise.

    Args:
      position: Position p of the query, from 0.
      config: Sparse branch; its `min_length` is a number.

    Example:
      >>> from elsaa_jax import SortLshConfig
      >>> from elsaa_jax.theory import complexity
      >>> [complexity.keys_read(p, SortLshConfig(block_size=64, min_length=256)) for p in (0, 255, 256, 65_535)]
      [1, 256, 65, 768]
    """
    check_int("position", position, 0)
    if config.min_length == "auto":
        raise ValueError("SortLshConfig.min_length is 'auto'; the number of keys needs a number")
    position, base = int(position), int(config.min_length or config.block_size)
    total, half = position % base + 1, base
    while half <= position:
        if position // half % 2:
            total += min((2 * config.num_neighbors + 1) * config.block_size, half)
        half *= 2
    return total
