"""Contenders of the benchmark: our attentions and those of other packages, behind one interface."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from elsaa_jax import ElsaaConfig, RaceConfig, SortLshConfig
from elsaa_jax.blocks import one_block as blocks
from elsaa_jax.dispatch import IMPLEMENTATIONS
from elsaa_jax.layers.hooks import attention_fn, sample_hashes
from elsaa_jax.layers.spec import ATTENTION_KINDS
from elsaa_jax.types import AttentionKind, Implementation

AUTO = "elsaa_auto"  # elsaa with min_length="auto"
BLOCKS = "blocks"  # the block attention of the sparse branch, without sorting and gathering
MATMUL = "matmul"  # the peak of the machine: one large matrix product
MATMUL_SIZE = 2048
PERFORMER_FEATURES = 256
REFORMER_BUCKET, REFORMER_HASHES = 64, 4
CAUSAL_BASE = 256

FULL_CONFIG = ElsaaConfig(
    race=RaceConfig(num_tables=4, num_bits=4, learn_beta=False),
    sparse=SortLshConfig(num_bits=12, block_size=256),
    performer_features=PERFORMER_FEATURES,
)
CAUSAL_CONFIG = dataclasses.replace(
    FULL_CONFIG,
    race=dataclasses.replace(FULL_CONFIG.race, chunk_size=128),
    sparse=SortLshConfig(num_bits=12, block_size=64, min_length=CAUSAL_BASE),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one measurement, in float32.

    Attributes:
      length: Number of tokens.
      causal: Whether the attention is causal.
      backward: Whether the gradients of query, key and value are computed as well.
      batch: Number of sequences.
      seed: Random seed of the inputs.
      heads: Number of heads.
      head_dim: Dimension of a head.
    """

    length: int
    causal: bool
    backward: bool
    batch: int = 1
    seed: int = 0
    heads: int = 4
    head_dim: int = 64

    @property
    def config(self) -> ElsaaConfig:
        """Configuration of our attentions."""
        return CAUSAL_CONFIG if self.causal else FULL_CONFIG


class Prepared(NamedTuple):
    """A contender that is compiled for one case.

    Attributes:
      run: Function that computes the attention and waits for its result.
      compile_seconds: Seconds of compilation, None if nothing is compiled.
      temp_bytes: Temporary memory as stated by the compiler, None if it does not state it.
    """

    run: Callable[[], Any]
    compile_seconds: float | None = None
    temp_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Contender:
    """An attention to measure.

    Attributes:
      prepare: Function that compiles it for a case.
      operations: Function that counts the floating-point operations of one head's forward pass, None if not counted.
      package: Package that must be installed.
      implementation: Implementation of one of our attentions. "pallas" needs a GPU.
      has_backward: Whether it is measured with a backward pass.
    """

    prepare: Callable[[Case], Prepared]
    operations: Callable[[Case], float] | None = None
    package: str = "jax"
    implementation: Implementation = "xla"
    has_backward: bool = True

    def gflops(self, case: Case, seconds: float) -> float | None:
        """Returns the rate of a forward pass that took `seconds`, None if its operations are not counted."""
        if self.operations is None:
            return None
        return self.operations(case) * case.batch * case.heads / seconds / 1e9

    @property
    def missing(self) -> str | None:
        """Reason why the contender cannot run here, None if it can."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed; see the README for the bench extra"
        if self.implementation == "pallas" and jax.default_backend() != "gpu":
            return "there is no GPU"
        return None


def contenders() -> dict[str, Contender]:
    """Returns all contenders by name, ours first. Names of other implementations than XLA are `kind:implementation`."""
    ours = {}
    for kind in ATTENTION_KINDS:
        for implementation in IMPLEMENTATIONS if kind != "performer" else ("xla",):
            prepare = _ours(kind, implementation)
            ours[of_implementation(kind, implementation)] = Contender(
                prepare, _OPERATIONS[kind], implementation=implementation
            )
    return ours | {
        AUTO: Contender(_ours("elsaa", "xla", auto=True)),
        BLOCKS: Contender(_blocks, _block_operations, has_backward=False),
        "jax_sdpa": Contender(_jax_sdpa, _exact_operations),
        "torch_sdpa": Contender(_torch_sdpa, _exact_operations, "torch"),
        "performer_pytorch": Contender(_performer_pytorch, None, "performer_pytorch"),
        "reformer_pytorch": Contender(_reformer_pytorch, None, "reformer_pytorch"),
        MATMUL: Contender(_matmul, lambda case: 2 * MATMUL_SIZE**3 / (case.batch * case.heads)),
    }


def of_implementation(kind: str, implementation: Implementation) -> str:
    """Returns the name of one of our attentions in an implementation."""
    return kind if implementation == "xla" else f"{kind}:{implementation}"


def _inputs(case: Case) -> list[jax.Array]:
    shape = (case.batch, case.length, case.heads, case.head_dim)
    return [jax.random.normal(rng, shape) for rng in jax.random.split(jax.random.key(case.seed), 3)]


def _compiled(function: Callable[..., jax.Array], arrays: list[jax.Array], backward: bool = False) -> Prepared:
    if backward:
        function = jax.grad(lambda *arrays, of=function: jnp.sum(of(*arrays)), argnums=(0, 1, 2))
    start = time.perf_counter()
    program = jax.jit(function).lower(*arrays).compile()
    seconds = time.perf_counter() - start
    memory: Any = program.memory_analysis()
    return Prepared(lambda: jax.block_until_ready(program(*arrays)), seconds, memory.temp_size_in_bytes)


def _ours(kind: AttentionKind, implementation: Implementation, auto: bool = False) -> Callable[[Case], Prepared]:
    def prepare(case: Case) -> Prepared:
        config = case.config
        if auto:
            config = dataclasses.replace(config, sparse=dataclasses.replace(config.sparse, min_length="auto"))
        hashes = sample_hashes(jax.random.key(3), case.head_dim, kind, config=config)
        attend = attention_fn(hashes, kind, config=config, is_causal=case.causal, implementation=implementation)
        return _compiled(attend, _inputs(case), case.backward)

    return prepare


def _blocks(case: Case) -> Prepared:
    """Prepares block attention over blocks of consecutive tokens."""
    size, scale = case.config.sparse.block_size, case.head_dim**-0.5

    def attend(*arrays: jax.Array) -> jax.Array:
        query, key, value = (x.reshape(-1, size, x.shape[-1]) for x in arrays)
        return blocks.forward(query, key, value, jnp.zeros((1, 1, size)), scale)[0]

    return _compiled(attend, _inputs(case))


def _block_operations(case: Case) -> float:
    return 4.0 * case.head_dim * case.length * case.config.sparse.block_size


def _jax_sdpa(case: Case) -> Prepared:
    def attend(*arrays: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*arrays, is_causal=case.causal)

    return _compiled(attend, _inputs(case), case.backward)


def _matmul(case: Case) -> Prepared:
    del case
    return _compiled(jnp.matmul, [jnp.ones((MATMUL_SIZE, MATMUL_SIZE))] * 2)


def _with_torch(case: Case, attend: Callable[..., Any], num_inputs: int = 3) -> Prepared:
    """Prepares a PyTorch attention on inputs of shape (batch, heads, length, dimension)."""
    torch: Any = importlib.import_module("torch")
    shape = (case.batch, case.heads, case.length, case.head_dim)
    generator = torch.Generator().manual_seed(case.seed)
    tensors = [torch.randn(shape, generator=generator).requires_grad_(case.backward) for _ in range(num_inputs)]

    def run() -> None:
        if case.backward:
            torch.autograd.grad(attend(*tensors).sum(), tensors)
        else:
            with torch.no_grad():
                attend(*tensors)

    return Prepared(run)


def _torch_sdpa(case: Case) -> Prepared:
    attend: Any = importlib.import_module("torch").nn.functional.scaled_dot_product_attention
    return _with_torch(case, lambda *tensors: attend(*tensors, is_causal=case.causal))


def _performer_pytorch(case: Case) -> Prepared:
    make: Any = importlib.import_module("performer_pytorch").FastAttention
    return _with_torch(case, make(dim_heads=case.head_dim, nb_features=PERFORMER_FEATURES, causal=case.causal))


def _reformer_pytorch(case: Case) -> Prepared:
    """Prepares Reformer, in which queries and keys are the same."""
    make: Any = importlib.import_module("reformer_pytorch").LSHAttention
    layer = make(bucket_size=REFORMER_BUCKET, n_hashes=REFORMER_HASHES, causal=case.causal)

    def attend(query: Any, value: Any) -> Any:
        return layer(query.flatten(0, 1), value.flatten(0, 1))[0]

    return _with_torch(case, attend, 2)


def _exact_operations(case: Case) -> float:
    seen = case.length * (case.length + 1) / 2 if case.causal else case.length**2
    return 4.0 * case.head_dim * seen


def _sort_lsh_operations(case: Case) -> float:
    sparse, length = case.config.sparse, case.length
    if not case.causal:
        seen = float(length * min(length, sparse.block_size))
    else:
        base = min(length, CAUSAL_BASE)
        levels = max(0, (length - 1) // base).bit_length()
        seen = length * (base + 1) / 2 + levels * length / 2 * sparse.block_size
    hashing = 2 * 2 * length * sparse.num_bits * case.head_dim
    return 4 * case.head_dim * seen + hashing


def _race_operations(case: Case) -> float:
    race, length = case.config.race, case.length
    buckets, planes = race.num_tables * 2**race.num_bits, race.num_tables * race.num_bits
    codes = 2 * 2 * length * planes * case.head_dim
    summaries = 2 * 2 * length * buckets * (case.head_dim + 1)
    within = 2 * length * race.chunk_size * (buckets + case.head_dim + 1) if case.causal else 0
    return codes + summaries + within


def _performer_operations(case: Case) -> float:
    features, length = case.config.performer_features, case.length
    project = 2 * 2 * length * features * case.head_dim
    summaries = 2 * 2 * length * features * (case.head_dim + 1)
    within = 2 * length * case.config.race.chunk_size * (features + case.head_dim + 1) if case.causal else 0
    return project + summaries + within


def _fused_operations(case: Case) -> float:
    return _sort_lsh_operations(case) + _race_operations(case)


_OPERATIONS: dict[AttentionKind, Callable[[Case], float]] = {
    "elsaa": _fused_operations,
    "race": _race_operations,
    "sort_lsh": _sort_lsh_operations,
    "sort_lsh_race": _fused_operations,
    "exact": _exact_operations,
    "performer": _performer_operations,
}
