"""Frozen, hashable configurations; each refuses bad values by name."""

from __future__ import annotations

import dataclasses
from typing import Literal

from elsaa_jax.checks import check_bool, check_choice, check_instance, check_int, check_number, check_shared_bits
from elsaa_jax.types import FusionKind, Pairing

MAX_SOFT_BITS = 12
BETA_RANGE = (0.01, 20.0)  # of a learned beta
MAX_HARD_BITS = 30


@dataclasses.dataclass(frozen=True)
class RaceConfig:
    """The low-rank branch (Alg. 2 and 3 of the paper).

    Attributes:
      num_tables: L, hash tables of one ensemble.
      num_bits: P, hyperplanes of one table; a table has 2**P soft buckets.
      num_ensembles: M, independent estimates whose outputs are averaged.
      beta: sharpness of the soft codes; its start where it is learned.
      learn_beta: whether a layer learns it, as exp(log_beta) within [0.01, 20].
      chunk_size: C, tokens of a chunk of the causal form.
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
        """M * L, the leading axis of the planes."""
        return self.num_ensembles * self.num_tables

    @property
    def total_planes(self) -> int:
        """M * L * P, all hyperplanes of the branch."""
        return self.total_tables * self.num_bits


@dataclasses.dataclass(frozen=True)
class SortLshConfig:
    """The sparse branch (Alg. 4 and 5 of the paper).

    Attributes:
      num_bits: P, hyperplanes of the one hash table.
      block_size: keys of a block; each query attends to one block, or more with neighbours.
      min_length: up to this many keys the branch is exact; in the causal form also the
        base length N0 of the split (0: `block_size`). "auto": as far as exact attention was measured to be
        faster on this platform (`elsaa_jax.crossover`), it is taken alone, without the low-rank branch; beyond, 0,
        and where causal 256.
      num_neighbors: further blocks on each side.
      pairing: "rank", "bucket", or None: "bucket" where causal, "rank" elsewhere.
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
    """How the two branches become one output (Eq. 5 and 6 of the paper).

    Attributes:
      kind: "elsaa", "convex", "sum" or "lse"; see `fuse`.
      lambda_kind: "fixed" (lambda_init), "scalar" (learned, exp(log_lambda)) or "query"
        (c + sigmoid(w . q + b) for each head, 0.8 at the start).
      lambda_init: lambda of "fixed", and the start of "scalar".
      gate_hidden: width of the gate's hidden layer.
      gate_input: "input" (the layer's input, gates shared by the heads) or "query"
        (the projected query, gates of each head).
      eps: the floor in the denominators of the multiplier and of RACE.
      stop_gradient_mass: whether the masses in the multiplier are constants to the gradient.
      mass_scale: "count" (the paper: sums over keys) or "mean" (each mass divided by the
        number of keys it sums over, so that the multiplier does not drift with the length).
      branch_dropout_rate: share of the examples of a training batch for which the sparse
        branch is switched off.
    """

    kind: FusionKind = "elsaa"
    lambda_kind: str = "scalar"
    lambda_init: float = 1.0
    gate_hidden: int = 64
    gate_input: str = "input"
    eps: float = 1e-6
    stop_gradient_mass: bool = True
    mass_scale: str = "count"
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
    """A whole ELSAA attention.

    Attributes:
      race: the low-rank branch.
      sparse: the sparse branch.
      fusion: how they are fused.
      share_planes: whether the sparse branch of a layer hashes with the first `sparse.num_bits`
        planes of the low-rank branch, so that what the soft codes learn, the hard codes use.
        None: where the low-rank branch has that many.
      short_conv: taps of a depthwise causal convolution on q, k and v after their
        projections; 0 for none.
      rotary_base: base of the rotary positions of q and k in a layer, 10,000 as a rule; 0 for none.
      performer_features: random features of the baseline named "performer".
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
        """`share_planes`, decided."""
        if self.share_planes is None:
            return self.sparse.num_bits <= self.race.total_planes
        return self.share_planes
