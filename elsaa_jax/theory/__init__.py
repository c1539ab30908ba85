"""The paper's rank theory as functions that tell whether sparse plus low-rank attention has full rank, and how surely.

    from elsaa_jax import theory

    theory.certify(65_536, num_tables=4, num_bits=4, r=61)  # isotropic certificate: density, thresholds, yes or no
    support = theory.sort_lsh_support(query, key, planes, sparse=True, block_size=64)
    theory.generic_rank(support, r=61)  # min(n, nu + r)

All functions use NumPy and SciPy in float64 and treat one head. The modules:

- `collisions`: probabilities that two tokens share a code.
- `supports`: random and real supports; `sorted_supports` builds long ones.
- `matchings`: maximum matchings of supports.
- `ranks`: predicted and numerical ranks.
- `rank_bounds`: the theorem, as bounds on the probability of failure.
- `thresholds`: its corollaries and the certificate.
- `operators`: attention as a matrix.
- `complexity`: work, parameters and memory, by formulas and counted from the library's programs.

docs/theory.md lists every statement of the paper with its function, and says which of them hold.
"""

from __future__ import annotations

from elsaa_jax.theory import complexity
from elsaa_jax.theory.collisions import (
    angular_similarity,
    collision_probability,
    edge_probability,
    isotropic_density,
    isotropic_mean,
)
from elsaa_jax.theory.matchings import deficiency, matching_size
from elsaa_jax.theory.operators import Operator, fused_operator, race_operator, race_rank, softmax_operator
from elsaa_jax.theory.rank_bounds import (
    MAX_ENUMERATED,
    delta_bound,
    delta_exact,
    delta_of_density,
    log_delta_bound,
    log_delta_of_density,
)
from elsaa_jax.theory.ranks import generic_matrix, generic_rank, numerical_rank
from elsaa_jax.theory.supports import independent_support, sort_lsh_support, with_safety
from elsaa_jax.theory.thresholds import (
    Certificate,
    certify,
    density_threshold,
    isotropic_threshold,
    safety_edges,
    smallest_density,
    tables_needed,
)

__all__ = [
    "MAX_ENUMERATED",
    "Certificate",
    "Operator",
    "angular_similarity",
    "certify",
    "collision_probability",
    "complexity",
    "deficiency",
    "delta_bound",
    "delta_exact",
    "delta_of_density",
    "density_threshold",
    "edge_probability",
    "fused_operator",
    "generic_matrix",
    "generic_rank",
    "independent_support",
    "isotropic_density",
    "isotropic_mean",
    "isotropic_threshold",
    "log_delta_bound",
    "log_delta_of_density",
    "matching_size",
    "numerical_rank",
    "race_operator",
    "race_rank",
    "safety_edges",
    "smallest_density",
    "softmax_operator",
    "sort_lsh_support",
    "tables_needed",
    "with_safety",
]
