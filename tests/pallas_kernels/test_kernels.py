"""Tests of the kernels without a GPU: lowering, addresses in the lowered IR, TF32, the settings, the command."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import elsaa_jax
from pallas_kernels import configs
from pallas_kernels.check import __main__ as command
from pallas_kernels.check import addresses, cases, compiling, layers, numerics, triton_ir
from tests.compilation import TRITON_IR

# The readout of a layer is the one with the fusion in it.
IN_A_LAYER = ["race_fused_readout" if name == "race_readout" else name for name in configs.KERNELS]
ONE_OF_EACH = dict.fromkeys(sorted(IN_A_LAYER), 1)
# The base of the causal split and its levels are two calls of block attention.
CAUSAL = ONE_OF_EACH | dict.fromkeys(configs.BLOCK_KERNELS, 2)


@TRITON_IR
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_a_layer_lowers_with_every_kernel(is_causal):
    function, arguments = layers.derivative(is_causal, 1024)
    kernels = layers.count_kernels(triton_ir.lower(function, *arguments).as_text())
    assert kernels == (CAUSAL if is_causal else ONE_OF_EACH)


@TRITON_IR
def test_one_traced_program_lowers_for_each_platform():
    def attend(*arrays):
        return elsaa_jax.exact_attention(*arrays).out.sum()

    arrays = [jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)] * 3
    traced = jax.jit(jax.grad(attend, argnums=(0, 1, 2))).trace(*arrays)
    on_gpu = layers.count_kernels(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert on_gpu == dict.fromkeys(sorted(configs.BLOCK_KERNELS), 1)
    assert layers.count_kernels(traced.lower().as_text()) == {}


def test_what_the_kernels_refuse_goes_to_xla():
    arrays = [jax.ShapeDtypeStruct((1, 64, 2, 24), jnp.float32)] * 3
    lowered = triton_ir.lower(elsaa_jax.exact_attention, *arrays)
    assert layers.count_kernels(lowered.as_text()) == {}


@TRITON_IR
@pytest.mark.parametrize("case", addresses.CASES, ids=str)
def test_no_address_is_out_of_bounds_or_written_twice(case):
    result = addresses.check(case)
    assert not result.faults, result.faults[0]
    assert len(result.runs) >= 3
    assert result.error < 1e-4
    for run in result.runs:
        assert run.bytes_moved >= run.bytes_touched > 0


@TRITON_IR
def test_planted_faults_are_caught():
    assert triton_ir.OUT_OF_BOUNDS in {fault.kind for fault in addresses.planted_out_of_bounds()}
    assert {fault.kind for fault in addresses.planted_two_writers()} == {triton_ir.TWO_WRITERS}


def test_tf32_costs_what_it_should():
    errors = list(numerics.errors(("tf32",)))
    assert {error.kernel for error in errors} == set(configs.KERNELS) - {"race_summary"}
    for error in errors:
        assert error.failure is None, error
        # It does something: float32 dots are a hundred times nearer.
        assert error.error > numerics.TOLERANCES["float32"], error


def test_the_table_has_every_configuration():
    for case in cases.all_cases(whole=True):
        for target in configs.TARGETS:
            settings = configs.settings_of(case.kernel, case.dtype, case.head_dim, target)
            assert settings.num_warps in (4, 8, 16)
            assert all(size & (size - 1) == 0 and size >= 16 for size in settings[:2])
    with (
        pytest.raises(ValueError, match=r"target is 70; it must be one of \(80, 90, 100, 120\)"),
        configs.use_target(70),
    ):
        pass


def test_without_the_backend_xla_runs(monkeypatch):
    monkeypatch.setattr(configs, "backend_is_there", lambda: False)
    x = jnp.zeros((1, 64, 2, 16), jnp.float32)
    assert layers.count_kernels(triton_ir.lower(elsaa_jax.exact_attention, x, x, x).as_text()) == {}
    with pytest.raises(ValueError, match=r"has no Triton backend of Pallas; use None or 'xla'"):
        elsaa_jax.exact_attention(x, x, x, implementation="pallas")


def test_the_backend_is_imported_when_a_kernel_is_traced():
    code = "import sys, elsaa_jax; assert not [m for m in sys.modules if 'pallas.triton' in m or m == 'triton']"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_summaries_whose_offsets_would_overflow_are_refused():
    x = jax.ShapeDtypeStruct((1, 2**21, 8, 64), jnp.float32)
    assert configs.race_refusal(x, x, 4, 4, 256) is None
    assert "chunks of 16 tokens have 4294967296 elements" in str(configs.race_refusal(x, x, 4, 4, 16))


@pytest.mark.parametrize(("size", "length", "tile"), [(64, 5, 16), (64, 17, 32), (64, 64, 64), (32, 1000, 32)])
def test_tiles_fit(size, length, tile):
    assert configs.fit(size, length) == tile


@pytest.mark.parametrize("keeps_ptx", [False, True], ids=["without PTX", "with PTX"])
def test_missing_tools_are_named(keeps_ptx, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "KEEPS_PTX", keeps_ptx)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    assert command.main(["--steps", "compilation,layers", "--json"]) == 0
    skipped = json.loads(capsys.readouterr().out)["skipped"]
    assert "pip install --no-deps jax-cuda13-plugin==" in skipped["compilation"]
    assert "ptxas is missing" in skipped["registers and spills"]
    assert "nvdisasm is missing" in skipped["tensor cores"]
    for measurement in ("registers and spills", "tensor cores"):
        assert ("keeps no PTX" in skipped[measurement]) is not keeps_ptx


def test_layers_alone_name_the_missing_compiler(monkeypatch, capsys):
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    assert command.main(["--steps", "layers", "--json"]) == 0
    assert "pip install --no-deps jax-cuda13-plugin==" in json.loads(capsys.readouterr().out)["skipped"]["layers"]


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        (compiling.Compiled(None, "sm_90", registers=255, spilled=8, tensor_cores=4), "spills 8 bytes of registers"),
        (compiling.Compiled(None, "sm_90", registers=32, spilled=0, tensor_cores=0), "uses no tensor cores"),
        (compiling.Compiled(None, "sm_90", error="too large"), "too large"),
        (compiling.Compiled(None, "sm_90", registers=32, spilled=0, tensor_cores=4), None),
        (layers.Layer(False, "sm_90", {}, (10, 170)), "memory grows by a factor of 17.0, above the limit of 16.5"),
        (layers.Layer(True, "sm_90", {}, (10, 170)), None),
        (numerics.Error("block_forward", "float32", False, 1e-3), "error 1.0e-03 is above the tolerance 1e-05"),
    ],
)
def test_failures(result, failure):
    assert result.failure == failure


def test_bad_flags_are_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--targets", "sm_70"])
    assert "--targets has 'sm_70'; each name must be one of sm_80, sm_90, sm_100, sm_120" in capsys.readouterr().err
