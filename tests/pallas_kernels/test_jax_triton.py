"""Tests of block attention forward by jax-triton: the choice of launcher, missing packages, and the numbers."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from pallas_kernels import block_attention, configs
from pallas_kernels.check import __main__ as command
from pallas_kernels.check import jax_triton

INSTALLED = pytest.mark.skipif(
    jax_triton.missing() is not None, reason="triton or jax-triton is not installed, so this route cannot run"
)


def test_the_context_chooses_who_launches(monkeypatch):
    calls = []

    def forward(*arguments):
        *arguments, settings = arguments
        calls.append(settings)
        return block_attention.forward(*arguments, settings._replace(launcher="pallas"))

    route = types.ModuleType("pallas_kernels.triton_route")
    monkeypatch.setattr(route, "forward", forward, raising=False)
    monkeypatch.setitem(sys.modules, "pallas_kernels.triton_route", route)
    monkeypatch.setattr(sys.modules["pallas_kernels"], "triton_route", route, raising=False)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, 2, 16)), jnp.float32)

    def attend():
        return elsaa_jax.exact_attention(x, x, x, implementation="interpret").out

    by_pallas = attend()
    assert not calls
    with configs.use_jax_triton():
        by_triton = attend()
    assert [settings.launcher for settings in calls] == ["jax-triton"]
    np.testing.assert_array_equal(by_pallas, by_triton)
    attend()
    assert len(calls) == 1
    jax.clear_caches()


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(jax_triton.importlib.util, "find_spec", lambda name: None)
    assert command.main(["--steps", "jax-triton"]) == 0
    assert "triton is missing: pip install --no-deps jax-triton==0.3.1 triton" in capsys.readouterr().out


@INSTALLED
def test_equals_the_reference():
    results = list(jax_triton.interpret())
    assert len(results) == 8
    for result in results:
        assert result.failure is None, result


def test_a_dead_process_is_a_failure():
    results = list(jax_triton._results({"PYTHONPATH": "/nowhere"}, "compile", "/nowhere"))
    assert results[-1].failure == "the process exited with status 1"
