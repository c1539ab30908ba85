"""A NumPy interpreter of the Triton IR to which Pallas lowers kernels.

It runs the same IR that the GPU compiler gets, one program of the grid after another. It finds faults that JAX's own
interpreter cannot see: accesses out of bounds, and two programs that write the same address. It also counts the bytes
that are read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import jax
import ml_dtypes
import numpy as np
from jax._src.lib import triton as triton_library
from jaxlib.mlir import ir

FaultKind: TypeAlias = Literal["out of bounds", "two programs write one address"]
OUT_OF_BOUNDS: Final = "out of bounds"
TWO_WRITERS: Final = "two programs write one address"
# With x64 enabled, some scalars have 64 bits.
TYPES = {
    "f64": np.float64, "f32": np.float32, "bf16": ml_dtypes.bfloat16,
    "i64": np.int64, "i32": np.int32, "i8": np.int8, "i1": np.bool_,
}  # fmt: skip


class Fault(NamedTuple):
    """A fault of a kernel.

    Attributes:
      kind: Kind of the fault.
      argument: Index of the kernel's argument that was accessed.
      program: Index of the program that accessed it.
      element: Index of the element that was accessed.
    """

    kind: FaultKind
    argument: int
    program: int
    element: int

    def __str__(self) -> str:
        return f"{self.kind}: argument {self.argument}, program {self.program}, element {self.element}"


class Run(NamedTuple):
    """Record of one run of a kernel.

    Attributes:
      name: Name of the kernel.
      outputs: Output arrays.
      faults: Faults that were found.
      bytes_moved: Number of bytes of all unmasked loads and stores.
      bytes_touched: Number of bytes at distinct addresses, the least that could be moved.
    """

    name: str
    outputs: list[np.ndarray]
    faults: list[Fault]
    bytes_moved: int
    bytes_touched: int


class Kernel(NamedTuple):
    """A kernel in a lowered program.

    Attributes:
      name: Name of the kernel.
      code: Triton IR.
      grid: Number of programs.
      aliases: Pairs of output index and index of the input whose memory it takes.
      outputs: Shapes and dtypes of the outputs.
    """

    name: str
    code: bytes
    grid: int
    aliases: dict[int, int]
    outputs: list[tuple[tuple[int, ...], Any]]


class Pointer(NamedTuple):
    """Addresses of elements of one argument.

    Attributes:
      argument: Index of the argument.
      offset: Indices of the elements in the flat array.
    """

    argument: int
    offset: Any


def lower(function: Callable, *arrays: Any) -> Any:
    """Lowers `function` for a GPU. No GPU is needed."""
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))


def kernels_of(lowered: Any) -> list[Kernel]:
    """Returns all kernels of a lowered program, in order."""
    found: list[Kernel] = []

    def visit(operation: Any) -> None:
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and "triton" in str(attributes["call_target_name"]):
            config = ir.DictAttr(attributes["mhlo.backend_config"])
            aliases = {}
            for alias in (
                ir.ArrayAttr(attributes["output_operand_aliases"]) if "output_operand_aliases" in attributes else ()
            ):
                text = str(alias)
                indices = text.split("output_tuple_indices = [")[1].split("]")[0]
                output = int(indices) if indices else 0
                aliases[output] = int(text.split("operand_index = ")[1].split(",")[0])
            outputs = [_shape_of(result.type) for result in operation.results]
            name = ir.StringAttr(config["name"]).value
            grid = ir.IntegerAttr(config["grid_x"]).value
            found.append(Kernel(name, ir.StringAttr(config["ir"]).value_bytes, grid, aliases, outputs))
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner.operation)

    visit(lowered.compiler_ir("stablehlo").operation)
    return found


def text_of(kernel: Kernel) -> str:
    """Returns the Triton IR of a kernel as text."""
    return str(_parse(kernel))


def _parse(kernel: Kernel) -> ir.Module:
    """Parses the Triton IR of a kernel."""
    context = ir.Context()
    triton_library.dialect.register_dialect(context)
    context.load_all_available_dialects()
    return ir.Module.parse(kernel.code, context)


def run(kernel: Kernel, inputs: Sequence[np.ndarray]) -> Run:
    """Runs a kernel on arrays, one program after another. Elements that are not written stay NaN, or 0 in integers."""
    # The module must outlive its operations, which do not keep it alive.
    module = _parse(kernel)
    (function,) = module.body.operations
    outputs = []
    for index, (shape, dtype) in enumerate(kernel.outputs):
        empty = np.full(shape, np.nan if np.issubdtype(dtype, np.floating) or dtype == ml_dtypes.bfloat16 else 0, dtype)
        outputs.append(np.array(inputs[kernel.aliases[index]]) if index in kernel.aliases else empty)
    memory = _Memory([np.asarray(x).reshape(-1) for x in inputs], [x.reshape(-1) for x in outputs], kernel.aliases)
    block = function.regions[0].blocks[0]
    for program in range(kernel.grid):
        memory.program = program
        values = {argument: Pointer(i, np.int64(0)) for i, argument in enumerate(block.arguments)}
        _run_block(block, values, memory)
    touched = sum(int(np.count_nonzero(t)) * x.itemsize for t, x in zip(memory.touched, memory.arrays, strict=True))
    return Run(kernel.name, outputs, memory.faults, memory.bytes_moved, touched)


class _Memory:
    """The arguments of a kernel as flat arrays, with a record of all accesses."""

    def __init__(self, inputs: list[np.ndarray], outputs: list[np.ndarray], aliases: dict[int, int]) -> None:
        self.arrays = [*inputs, *outputs]
        # An aliased input shares the memory of its output.
        self.same = {aliased: len(inputs) + output for output, aliased in aliases.items()}
        self.writer = [np.full(x.shape, -1, np.int64) for x in self.arrays]
        self.touched = [np.zeros(x.shape, bool) for x in self.arrays]
        self.faults: list[Fault] = []
        self.bytes_moved = 0
        self.program = 0

    def _elements(self, pointer: Pointer, mask: Any) -> tuple[int, np.ndarray, np.ndarray]:
        """Returns the argument, the element indices, and which of them are to be accessed. Records faults."""
        argument = self.same.get(pointer.argument, pointer.argument)
        offset = np.asarray(pointer.offset)
        wanted = np.ones(offset.shape, bool) if mask is None else np.broadcast_to(mask, offset.shape)
        inside = (offset >= 0) & (offset < self.arrays[argument].size)
        for element in offset[wanted & ~inside].reshape(-1)[:1]:
            self.faults.append(Fault(OUT_OF_BOUNDS, argument, self.program, int(element)))
        use = wanted & inside
        self.bytes_moved += int(np.count_nonzero(use)) * self.arrays[argument].itemsize
        return argument, np.where(use, offset, 0), use

    def load(self, pointer: Pointer, mask: Any, other: Any) -> np.ndarray:
        """Reads elements. Masked elements read as `other`, or 0."""
        argument, offset, use = self._elements(pointer, mask)
        self.touched[argument][offset[use]] = True
        array = self.arrays[argument]
        return np.where(use, array[offset], array.dtype.type(0) if other is None else other).astype(array.dtype)

    def store(self, pointer: Pointer, value: Any, mask: Any) -> None:
        """Writes elements that are not masked."""
        argument, offset, use = self._elements(pointer, mask)
        elements = offset[use].reshape(-1)
        writers = self.writer[argument][elements]
        for element in elements[(writers >= 0) & (writers != self.program)][:1]:
            self.faults.append(Fault(TWO_WRITERS, argument, self.program, int(element)))
        self.writer[argument][elements] = self.program
        self.touched[argument][elements] = True
        self.arrays[argument][elements] = np.broadcast_to(value, offset.shape)[use].reshape(-1)


def _shape_of(mlir_type: Any) -> tuple[tuple[int, ...], Any]:
    if isinstance(mlir_type, ir.RankedTensorType):
        tensor = ir.RankedTensorType(mlir_type)
        return tuple(tensor.shape), TYPES.get(str(tensor.element_type))
    return (), TYPES.get(str(mlir_type))


COMPARISONS = {0: np.equal, 1: np.not_equal, 2: np.less, 3: np.less_equal, 4: np.greater, 5: np.greater_equal}
FLOAT_COMPARISONS = {
    1: np.equal, 2: np.greater, 3: np.greater_equal, 4: np.less, 5: np.less_equal, 6: np.not_equal, 13: np.not_equal,
}  # fmt: skip
BINARY = {
    "arith.addi": np.add, "arith.addf": np.add, "arith.subi": np.subtract, "arith.subf": np.subtract,
    "arith.muli": np.multiply, "arith.mulf": np.multiply, "arith.divf": np.divide, "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor, "arith.minsi": np.minimum, "arith.maxsi": np.maximum,
    "arith.maxnumf": np.fmax, "arith.maximumf": np.maximum, "arith.minnumf": np.fmin, "arith.minimumf": np.minimum,
    "arith.shrsi": np.right_shift, "arith.shli": np.left_shift,
}  # fmt: skip
UNARY = {
    "__nv_expf": np.exp, "__nv_logf": np.log, "__nv_tanhf": np.tanh, "__nv_fabsf": np.abs, "math.absf": np.abs,
    "math.exp": np.exp, "math.log": np.log, "arith.negf": np.negative,
}  # fmt: skip
CASTS = (
    "arith.extf", "arith.truncf", "arith.sitofp", "arith.uitofp", "arith.extui", "arith.trunci", "arith.extsi",
)  # fmt: skip


def _truncated_division(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    quotient = np.abs(x) // np.abs(np.where(y == 0, 1, y))
    return (np.sign(x) * np.sign(y) * quotient).astype(np.int32)


def _run_block(block: Any, values: dict, memory: _Memory) -> list[Any]:
    """Runs the operations of a block and returns the operands of its terminator."""
    for operation in block.operations:
        name, operands = operation.operation.name, [values[x] for x in operation.operands]
        if name in ("scf.yield", "tt.return", "tt.reduce.return"):
            return operands
        with np.errstate(all="ignore"):
            results = _evaluate(operation.operation, name, operands, values, memory)
        for result, value in zip(operation.operation.results, results, strict=True):
            values[result] = value
    return []


def _evaluate(operation: Any, name: str, operands: list[Any], values: dict, memory: _Memory) -> list[Any]:
    attributes = operation.attributes
    shape, dtype = _shape_of(operation.results[0].type) if len(operation.results) else ((), None)
    if name == "arith.constant":
        return [_constant(attributes["value"], shape, dtype)]
    if name == "tt.get_program_id":
        return [np.int32(memory.program)]
    if name == "tt.make_range":
        return [np.arange(attributes["start"].value, attributes["end"].value, dtype=np.int32)]
    if name in ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape"):
        return [_reshape(operands[0], name, shape, attributes)]
    if name == "tt.addptr":
        pointer, offset = operands
        return [Pointer(pointer.argument, np.add(pointer.offset, np.asarray(offset, np.int64)))]
    if name == "tt.load":
        mask, other = ([*operands[1:], None, None])[:2]
        return [memory.load(operands[0], mask, other)]
    if name == "tt.store":
        memory.store(operands[0], operands[1], operands[2] if len(operands) > 2 else None)
        return []
    if name == "tt.dot":
        x, y, start = (np.asarray(x, np.float32) for x in operands)
        return [start + x @ y]
    if name == "tt.trans":
        return [np.transpose(operands[0])]
    if name == "tt.reduce":
        return [_reduce(operation, operands[0], attributes["axis"].value)]
    if name == "scf.for":
        return _loop(operation, operands, values, memory)
    if name == "scf.if":
        region = operation.regions[0 if bool(operands[0]) else 1]
        return _run_block(region.blocks[0], values, memory) if len(region.blocks) else []
    if name == "arith.select":
        return [np.where(*operands).astype(dtype)]
    if name == "arith.cmpi":
        return [COMPARISONS[attributes["predicate"].value](*operands)]
    if name == "arith.cmpf":
        return [FLOAT_COMPARISONS[attributes["predicate"].value](*operands)]
    if name == "arith.divsi":
        return [_truncated_division(*operands)]
    if name == "arith.remsi":
        return [(operands[0] - _truncated_division(*operands) * operands[1]).astype(np.int32)]
    if name in ("tt.bitcast", "arith.bitcast"):
        return [np.asarray(operands[0]).view(dtype)]
    if name in CASTS:
        return [np.asarray(operands[0]).astype(dtype)]
    if name in BINARY:
        return [np.asarray(BINARY[name](*operands)).astype(dtype)]
    symbol = attributes["symbol"].value if name == "tt.extern_elementwise" else name
    if symbol in UNARY:
        return [UNARY[symbol](operands[0]).astype(dtype)]
    raise NotImplementedError(f"the interpreter of Triton IR has no operation {symbol}; add it to `_evaluate`")


def _constant(attribute: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if isinstance(attribute, ir.DenseElementsAttr):
        dense = ir.DenseElementsAttr(attribute)
        splat: Any = dense.get_splat_value() if dense.is_splat else None
        value = np.array(dense) if splat is None else splat.value
    else:
        value = attribute.value
    return np.broadcast_to(np.asarray(value).astype(dtype), shape)


def _reshape(x: Any, name: str, shape: tuple[int, ...], attributes: Any) -> Any:
    def change(array: Any) -> np.ndarray:
        if name == "tt.expand_dims":
            return np.expand_dims(array, attributes["axis"].value)
        return np.reshape(array, shape) if name == "tt.reshape" else np.broadcast_to(array, shape)

    return Pointer(x.argument, change(x.offset)) if isinstance(x, Pointer) else change(x)


def _reduce(operation: Any, x: np.ndarray, axis: int) -> np.ndarray:
    inner = next(o.operation.name for o in operation.regions[0].blocks[0].operations)
    if inner in ("arith.addf", "arith.addi"):
        return np.sum(x, axis=axis, dtype=x.dtype)
    if inner in ("arith.maxnumf", "arith.maximumf"):
        return np.max(x, axis=axis)
    raise NotImplementedError(f"the interpreter of Triton IR has no reduction {inner}; add it to `_reduce`")


def _loop(operation: Any, operands: list[Any], values: dict, memory: _Memory) -> list[Any]:
    lower, upper, step, *state = operands
    block = operation.regions[0].blocks[0]
    for index in range(int(lower), int(upper), int(step)):
        for argument, value in zip(block.arguments, [np.int32(index), *state], strict=True):
            values[argument] = value
        state = _run_block(block, values, memory)
    return state
