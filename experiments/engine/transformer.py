"""The blocks of a pre-LN transformer, which all models share."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from elsaa_jax import ELSAA, ElsaaConfig
from elsaa_jax.checks import check_bool, check_choice, check_int, check_number
from elsaa_jax.types import AttentionKind

Positions = Literal["none", "learned", "rope"]
ROTARY_BASE = 10_000.0
NORMAL = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a pre-LN transformer.

    Attributes:
      width: features of a token.
      num_layers: blocks of attention and MLP.
      num_heads: heads of each attention.
      mlp_width: hidden features of each MLP.
      positions: "none", "learned" (a table of `num_positions`, stretched by linear interpolation over longer inputs) or
        "rope".
      num_positions: rows of the table of learned positions.
      tie_head: whether the head is the transposed table of tokens.
      dropout_rate: on the outputs of attention and MLP.
      dtype: of the computation; parameters are float32.
      remat: whether the backward pass computes each block anew, so that only what lies between blocks is kept.
    """

    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    mlp_width: int = 128
    positions: Positions = "none"
    num_positions: int = 1024
    tie_head: bool = False
    dropout_rate: float = 0.0
    dtype: str = "float32"
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "num_layers", "num_heads", "mlp_width", "num_positions"):
            check_int(f"ModelConfig.{name}", getattr(self, name), 1)
        if self.width % self.num_heads:
            raise ValueError(
                f"ModelConfig.width is {self.width}; it must be a multiple of num_heads = {self.num_heads}"
            )
        check_choice("ModelConfig.positions", self.positions, ("none", "learned", "rope"))
        check_choice("ModelConfig.dtype", self.dtype, ("float32", "bfloat16"))
        check_number("ModelConfig.dropout_rate", self.dropout_rate, 0.0, 1.0)
        check_bool("ModelConfig.remat", self.remat)


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention of all layers of a model.

    Attributes:
      kind: which one, by name.
      config: of it, before the positions of the model are added.
      is_causal: whether a token sees the past alone.
      use_bias: whether its projections have biases.
      sow_weights: whether gates, lambda, multiplier and masses go into "intermediates".
    """

    kind: AttentionKind
    config: ElsaaConfig
    is_causal: bool
    use_bias: bool = True
    sow_weights: bool = False


def blocks(
    module: nn.Module,
    sizes: ModelConfig,
    attention: Attention,
    x: jax.Array,
    num_outputs: int | None,
    deterministic: bool,
    *,
    first_alone: bool = False,
) -> jax.Array:
    """All blocks and the last norm, as parts of the module that calls it.

    Args:
      module: that calls it.
      sizes: of the model.
      attention: of all layers.
      x: (B, S, width), with learned positions added already.
      num_outputs: how many of the last positions are wanted, all where None. Only they query in the last layer, so that
        a causal one costs next to nothing where few are wanted.
      deterministic: no dropout, neither of outputs nor of branches.
      first_alone: whether the first position alone is wanted. All query in the last layer: which keys a query meets may
        depend on the others. Its MLP is that of the first one.

    Returns:
      (B, num_outputs, width).
    """
    if sizes.positions == "rope":
        config = dataclasses.replace(attention.config, rotary_base=ROTARY_BASE)
        attention = dataclasses.replace(attention, config=config)
    for layer in range(sizes.num_layers):
        last = layer == sizes.num_layers - 1
        wanted = x.shape[1] if num_outputs is None or not last else num_outputs

        def block(
            module: nn.Module,
            x: jax.Array,
            layer: int = layer,
            first: int = x.shape[1] - wanted,
            first_alone: bool = first_alone and last,
        ) -> jax.Array:
            del module
            return _block(sizes, attention, x, layer, first, first_alone, deterministic)

        x = (nn.remat(block) if sizes.remat else block)(module, x)
    return nn.LayerNorm(dtype=jnp.dtype(sizes.dtype), name="norm")(x)


def _block(
    sizes: ModelConfig,
    attention: Attention,
    x: jax.Array,
    layer: int,
    first: int,
    first_alone: bool,
    deterministic: bool,
) -> jax.Array:
    """(B, S, width) -> (B, S - first, width), or (B, 1, width) with `first_alone`."""
    dtype = jnp.dtype(sizes.dtype)
    drop = nn.Dropout(sizes.dropout_rate, deterministic=deterministic)
    keys = nn.LayerNorm(dtype=dtype, name=f"attention_norm_{layer}")(x)
    attend = ELSAA(
        sizes.num_heads,
        dtype=dtype,
        is_causal=attention.is_causal,
        use_bias=attention.use_bias,
        attention=attention.kind,
        config=attention.config,
        deterministic=deterministic,
        name=f"attention_{layer}",
    )
    x = x[:, first:] + drop(attend(keys[:, first:], keys, sow_weights=attention.sow_weights))
    if first_alone:
        x = x[:, :1]
    hidden = nn.LayerNorm(dtype=dtype, name=f"mlp_norm_{layer}")(x)
    hidden = nn.gelu(nn.Dense(sizes.mlp_width, dtype=dtype, name=f"mlp_in_{layer}")(hidden))
    return x + drop(nn.Dense(sizes.width, dtype=dtype, name=f"mlp_out_{layer}")(hidden))


def stretch(table: Any, length: int) -> jax.Array:
    """(P, width) -> (length, width): its first rows, or where it is too short, all of it by linear interpolation."""
    rows = table.shape[0]
    if length <= rows:
        return table[:length]
    places = jnp.linspace(0.0, rows - 1.0, length)
    low = jnp.minimum(places.astype(jnp.int32), rows - 2) if rows > 1 else jnp.zeros(length, jnp.int32)
    share = (places - low.astype(jnp.float32))[:, None]
    return table[low] * (1 - share) + table[jnp.minimum(low + 1, rows - 1)] * share


def add_positions(
    module: nn.Module, sizes: ModelConfig, x: jax.Array, start: nn.initializers.Initializer = NORMAL
) -> jax.Array:
    """(B, S, width), with the learned positions of a module added where its sizes ask for them; `start` begins them."""
    if sizes.positions != "learned":
        return x
    table = module.param("positions", start, (sizes.num_positions, sizes.width))
    return x + stretch(table, x.shape[1]).astype(x.dtype)[None]


def count_parameters(variables: dict[str, Any]) -> int:
    """Numbers that are trained."""
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
