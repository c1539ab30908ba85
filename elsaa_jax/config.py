"""Frozen, hashable configurations. Each refuses bad values by name."""

from __future__ import annotations

import dataclasses
from typing import Literal

from elsaa_jax.checks import check_bool, check_choice, check_instance, check_int, check_number, check_shared_bits
from elsaa_jax.types import FusionKind, GateInput, LambdaKind, MassScale, Pairing

MAX_SOFT_BITS = 12
BETA_RANGE = (0.01, 20.0)  # Range of a learned beta.
MAX_HARD_BITS = 30


@dataclasses.dataclass(frozen=True)
class RaceConfig:
    """Settings of the low-rank branch (Alg. 2 and 3 of the paper).

    Attributes:
      num_tables: Hash tables of one ensemble, L.
      num_bits: Hyperplanes of one table, P. A table has `2**P` soft buckets.
      num_ensembles: Independent estimates whose outputs are averaged, M.
      beta: Sharpness of the soft codes, or its initial value if it is learned.
      learn_beta: Whether a layer learns beta, as exp(log_beta) within [0.01, 20].
      chunk_size: Tokens of a chunk of the causal form, C.

    Example:
      >>> from elsaa_jax import RaceConfig
      >>> RaceConfig(num_tables=4, num_bits=4).total_planes
      16
    """

    num_tables: int = 4
    num_bits: int = 4
    num_ensembles: int = 1
    beta: float = 1.0
    learn_beta: bool = True
    chunk_size: int = 256

    def __post_init__(self) -> None:
        check_int("RaceConfig.num_tables", self.num_tables, 1)
        check_int("RaceConfig.num_bits", self.num_bits, 1, MAX_SOFT_BITS)
        check_int("RaceConfig.num_ensembles", self.num_ensembles, 1)
        check_number("RaceConfig.beta", self.beta, 0.0, open_low=True)
        check_bool("RaceConfig.learn_beta", self.learn_beta)
        if self.learn_beta and not BETA_RANGE[0] <= self.beta <= BETA_RANGE[1]:
            raise ValueError(
                f"RaceConfig.beta is {self.beta!r}; where it is learned it must lie within {BETA_RANGE}, "
                "or learn_beta must be False"
            )
        check_int("RaceConfig.chunk_size", self.chunk_size, 1)

    @property
    def total_tables(self) -> int:
        """Tables of all ensembles, M * L: the leading axis of the planes."""
        return self.num_ensembles * self.num_tables

    @property
    def total_planes(self) -> int:
        """Hyperplanes of the branch, M * L * P."""
        return self.total_tables * self.num_bits


@dataclasses.dataclass(frozen=True)
class SortLshConfig:
    """Settings of the sparse branch (Alg. 4 and 5 of the paper).

    Attributes:
      num_bits: Hyperplanes of the hash, P.
      block_size: Keys of a block. Each query attends to one block, or to more with neighbours.
      min_length: The branch is exact up to this many keys. In the causal form it is also N0, the length of a stretch
        (0 means `block_size`). "auto": up to the length at which exact attention was measured to be faster on this
        platform (`elsaa_jax.sparse.crossover`), exact attention runs alone, without the low-rank branch; beyond that
        length "auto" means 0, and 256 in the causal form.
      num_neighbors: Further blocks on each side of a query's own.
      pairing: Rule by which a query finds its block, "rank" or "bucket". Default: "bucket" if causal, else "rank".

    Example:
      >>> from elsaa_jax import SortLshConfig
      >>> SortLshConfig(num_bits=12, block_size=64, min_length=256).pairing is None
      True
    """

    num_bits: int = 5
    block_size: int = 256
    min_length: int | Literal["auto"] = 0
    num_neighbors: int = 0
    pairing: Pairing | None = None

    def __post_init__(self) -> None:
        check_int("SortLshConfig.num_bits", self.num_bits, 1, MAX_HARD_BITS)
        check_int("SortLshConfig.block_size", self.block_size, 1)
        if self.min_length != "auto":
            try:
                check_int("SortLshConfig.min_length", self.min_length, 0)
            except ValueError as error:
                raise ValueError(f"{error}, or 'auto'") from None
        check_int("SortLshConfig.num_neighbors", self.num_neighbors, 0)
        check_choice("SortLshConfig.pairing", self.pairing, (None, "rank", "bucket"))


@dataclasses.dataclass(frozen=True)
class FusionConfig:
    """Settings of the fusion of the two branches (Eq. 5 and 6 of the paper).

    Attributes:
      kind: Kind of fusion: "elsaa", "convex", "sum" or "lse"; see `elsaa_jax.fuse`.
      lambda_kind: Kind of lambda: "fixed" (`lambda_init`), "scalar" (learned, exp(log_lambda)) or "query"
        (c + sigmoid(w . q + b) for each head, 0.8 at the start).
      lambda_init: Lambda of "fixed", and the initial value of "scalar".
      gate_hidden: Width of the gate's hidden layer.
      gate_input: Input of the gate: "input" (the layer's input; the heads share the gates) or "query" (the projected
        query; each head has its gates).
      eps: Floor in the denominators of the multiplier and of RACE.
      stop_gradient_mass: Whether the masses in the multiplier are constants to the gradient.
      mass_scale: Scale of the masses: "count" (the paper: sums over keys) or "mean" (each mass is divided by its
        number of keys, so that the multiplier does not drift with the length).
      branch_dropout_rate: Share of a training batch that runs without the sparse branch.

    Example:
      >>> from elsaa_jax import FusionConfig
      >>> FusionConfig(kind="convex", lambda_kind="fixed", lambda_init=0.5).mass_scale
      'count'
    """

    kind: FusionKind = "elsaa"
    lambda_kind: LambdaKind = "scalar"
    lambda_init: float = 1.0
    gate_hidden: int = 64
    gate_input: GateInput = "input"
    eps: float = 1e-6
    stop_gradient_mass: bool = True
    mass_scale: MassScale = "count"
    branch_dropout_rate: float = 0.0

    def __post_init__(self) -> None:
        check_choice("FusionConfig.kind", self.kind, FUSION_KINDS)
        check_choice("FusionConfig.lambda_kind", self.lambda_kind, ("fixed", "scalar", "query"))
        check_number("FusionConfig.lambda_init", self.lambda_init, 0.0, open_low=True)
        if self.lambda_kind == "query" and self.lambda_init != 1.0:
            raise ValueError(
                f"FusionConfig.lambda_init is {self.lambda_init!r}, but lambda_kind='query' starts at 0.8 "
                "as in the paper; leave lambda_init at 1.0 or use lambda_kind='scalar' or 'fixed'"
            )
        check_int("FusionConfig.gate_hidden", self.gate_hidden, 1)
        check_choice("FusionConfig.gate_input", self.gate_input, ("input", "query"))
        check_number("FusionConfig.eps", self.eps, 0.0)
        check_bool("FusionConfig.stop_gradient_mass", self.stop_gradient_mass)
        check_choice("FusionConfig.mass_scale", self.mass_scale, ("count", "mean"))
        check_number("FusionConfig.branch_dropout_rate", self.branch_dropout_rate, 0.0, 1.0)


FUSION_KINDS: tuple[FusionKind, ...] = ("elsaa", "convex", "sum", "lse")


@dataclasses.dataclass(frozen=True)
class ElsaaConfig:
    """Settings of a whole ELSAA attention.

    Attributes:
      race: Settings of the low-rank branch.
      sparse: Settings of the sparse branch.
      fusion: Settings of the fusion.
      share_planes: Whether the sparse branch of a layer hashes with the first `sparse.num_bits` planes of the low-rank
        branch, so that the hard codes use what the soft codes learn. By default it does if there are that many planes.
      short_conv: Taps of a depthwise causal convolution on q, k and v after their projections; 0 for none.
      rotary_base: Base of the rotary positions of q and k in a layer, usually 10,000; 0 for none.
      performer_features: Random features of the baseline "performer".

    Example:
      >>> from elsaa_jax import ElsaaConfig, SortLshConfig
      >>> ElsaaConfig(sparse=SortLshConfig(num_bits=12)).shares_planes  # 4 tables of 4 bits have 16 planes
      True
    """

    race: RaceConfig = RaceConfig()
    sparse: SortLshConfig = SortLshConfig()
    fusion: FusionConfig = FusionConfig()
    share_planes: bool | None = None
    short_conv: int = 0
    rotary_base: float = 0.0
    performer_features: int = 256

    def __post_init__(self) -> None:
        check_instance("ElsaaConfig.race", self.race, RaceConfig)
        check_instance("ElsaaConfig.sparse", self.sparse, SortLshConfig)
        check_instance("ElsaaConfig.fusion", self.fusion, FusionConfig)
        check_choice("ElsaaConfig.share_planes", self.share_planes, (None, True, False))
        check_int("ElsaaConfig.short_conv", self.short_conv, 0)
        check_number("ElsaaConfig.rotary_base", self.rotary_base, 0.0)
        check_int("ElsaaConfig.performer_features", self.performer_features, 1)
        if self.share_planes:
            check_shared_bits(self.sparse.num_bits, self.race.total_planes)

    @property
    def shares_planes(self) -> bool:
        """Whether the branches share planes, after the default is resolved."""
        if self.share_planes is None:
            return self.sparse.num_bits <= self.race.total_planes
        return self.share_planes
