"""The blocks of a pre-LN transformer, which all models share."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from elsaa_jax import ELSAA, ElsaaConfig
from elsaa_jax.checks import check_bool, check_choice, check_int, check_number
from elsaa_jax.types import AttentionKind

Positions = Literal["none", "learned", "rope"]
Dtype = Literal["float32", "bfloat16"]
ROTARY_BASE = 10_000.0
NORMAL = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a pre-LN transformer.

    Attributes:
      width: Number of features per token.
      num_layers: Number of blocks of attention and MLP.
      num_heads: Number of heads of each attention.
      mlp_width: Number of hidden features of each MLP.
      positions: Position encoding: "none", "learned" (a table with `num_positions` rows, interpolated linearly for
        longer inputs) or "rope".
      num_positions: Number of rows of the table of learned positions.
      tie_head: Whether the output layer is the transposed embedding table.
      dropout_rate: Dropout rate of the outputs of attention and MLP.
      dtype: Data type of the computation. Parameters are float32.
      remat: Whether the backward pass recomputes each block, so that only the inputs of blocks are stored.
    """

    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    mlp_width: int = 128
    positions: Positions = "none"
    num_positions: int = 1024
    tie_head: bool = False
    dropout_rate: float = 0.0
    dtype: Dtype = "float32"
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "num_layers", "num_heads", "mlp_width", "num_positions"):
            check_int(f"ModelConfig.{name}", getattr(self, name), 1)
        if self.width % self.num_heads:
            raise ValueError(
                f"ModelConfig.width is {self.width}; it must be a multiple of num_heads = {self.num_heads}"
            )
        check_choice("ModelConfig.positions", self.positions, get_args(Positions))
        check_choice("ModelConfig.dtype", self.dtype, get_args(Dtype))
        check_number("ModelConfig.dropout_rate", self.dropout_rate, 0.0, 1.0)
        check_bool("ModelConfig.remat", self.remat)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Settings of the attention in all layers of a model.

    Attributes:
      kind: Kind of the attention.
      config: Configuration of the attention, before the rotary positions of the model are added.
      is_causal: Whether the attention is causal.
      use_bias: Whether its projections have biases.
      sow_weights: Whether gates, lambda, multiplier and masses are stored in "intermediates".
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
    """Applies all blocks and the final norm, as submodules of the calling module.

    Args:
      module: Module that calls this function.
      sizes: Sizes of the model.
      attention: Settings of the attention in all layers.
      x: Features with learned positions added, (B, S, width).
      num_outputs: Number of last positions that are wanted. None wants all. In the last layer only these positions are
        queries, so a causal last layer is cheap if few are wanted.
      deterministic: Whether dropout of outputs and of branches is off.
      first_alone: Whether only the first position is wanted. In the last layer all positions are queries, because the
        keys of a query may depend on the other queries; the MLP then runs on the first position only.

    Returns:
      Features of the wanted positions, (B, num_outputs, width).
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
    """Applies one block, (B, S, width) -> (B, S - first, width), or (B, 1, width) with `first_alone`."""
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
    """Returns the first `length` rows of a table; interpolates a table with fewer rows linearly to `length` rows."""
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
    """Adds learned positions to (B, S, width), if the sizes ask for them; `start` initialises their table."""
    if sizes.positions != "learned":
        return x
    table = module.param("positions", start, (sizes.num_positions, sizes.width))
    return x + stretch(table, x.shape[1]).astype(x.dtype)[None]


def count_parameters(variables: dict[str, Any]) -> int:
    """Returns the number of trained parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
