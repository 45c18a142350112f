"""Instantiations that usual solves compile ahead exist, are compiled once, and are waited for by those who need them."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_instances import INSTANCES

from penstock.spmv import CPU
from penstock.spmv.compilation import cuda_module
from penstock.spmv.compilation import usual_kernels as usual_kernels_module
from penstock.spmv.compilation.cuda_module import CudaSource, compile_function, compile_together, known_sources
from penstock.spmv.compilation.cupy_kernels import CUPY, compile_cupy_kernel, evaluate
from penstock.spmv.compilation.usual_kernels import OPENING, begin_compilation, usual_kernels

SOURCE = CudaSource("penstock.spmv.kernels", "coo.cu")


@pytest.fixture
def compiler(monkeypatch):
    """A stand-in for CuPy whose modules note what they compile, and wait for ``go``."""
    noted, go = [], threading.Event()
    go.set()

    class RawModule:
        def __init__(self, code, options, name_expressions):
            self.expressions = name_expressions

        def get_function(self, expression):
            assert expression in self.expressions
            go.wait(60)
            noted.append(expression)
            if expression == "broken":
                raise ValueError("no such kernel")
            return f"compiled {expression}"

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=RawModule))
    monkeypatch.setattr(cuda_module, "_ready", {})
    monkeypatch.setattr(cuda_module, "_functions", {})
    return SimpleNamespace(noted=noted, go=go)


def test_every_instantiation_exists():
    known = {str(source): set(names) for source, names in INSTANCES.items()}

    kernels = usual_kernels()

    assert OPENING in kernels
    assert len(kernels) > 5
    for case, files in kernels.items():
        for file, names in files.items():
            if file == CUPY:
                continue
            assert set(names) <= known[file], (case, file)
            assert file in known_sources()


def test_what_is_compiled_in_the_background_is_waited_for_and_not_compiled_again(compiler):
    compiler.go.clear()
    compile_together([(SOURCE, "one"), (SOURCE, "two"), (SOURCE, "one")], [], 2, CPU)
    threading.Timer(0.1, compiler.go.set).start()

    assert compile_function(SOURCE, "two") == "compiled two"
    assert compile_function(SOURCE, "one") == "compiled one"
    assert compile_function(SOURCE, "one") == "compiled one"

    assert sorted(compiler.noted) == ["one", "two"]


def test_kernels_of_a_file_that_are_no_templates_are_compiled_in_one_program(compiler):
    compile_function(known_sources()["bisection.cu"], "rank_nodes")

    names = [name for name in INSTANCES[known_sources()["bisection.cu"]] if "<" not in name]
    assert sorted(compiler.noted) == sorted(names)
    assert compile_function(known_sources()["bisection.cu"], "find_extents") == "compiled find_extents"
    assert len(compiler.noted) == len(names)


@pytest.mark.parametrize("file", sorted(map(str, INSTANCES)))
def test_the_kernels_that_are_no_templates_are_found_in_every_file(file):
    source = known_sources()[file]
    plain = sorted(name for name in INSTANCES[source] if "<" not in name)

    for name in plain:
        assert list(cuda_module._compiled_with(source, name)) == plain


def test_an_error_reaches_those_who_need_the_kernel_and_the_next_call_tries_again(compiler):
    for count in (1, 2):
        with pytest.raises(ValueError, match="no such kernel"):
            compile_function(SOURCE, "broken")
        assert compiler.noted == ["broken"] * count


def test_an_unknown_case_compiles_nothing(compiler):
    begin_compilation("gauss_seidel of 5 unknowns a node, one vector, in memory", CPU)

    assert not compiler.noted


def test_kernels_of_cupy_are_compiled_by_calls_for_one_number(monkeypatch):
    called = []

    def add(*arguments):
        called.append(
            tuple(str(argument.dtype) if isinstance(argument, np.ndarray) else argument for argument in arguments)
        )

    core = SimpleNamespace(elementwise_copy=add)
    cupy = SimpleNamespace(
        empty=np.empty, add=add, arange=lambda count, dtype: called.append((count, dtype)), _core=core
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    for call in ("add(int64, int)", "copy(int32, float64)", "fill(float64)", "arange(int64)", "unheard_of(int64)"):
        compile_cupy_kernel(call)

    assert called == [("int64", 1), ("int32", "float64"), (1, "int64")]


def test_libraries_are_loaded_before_kernels_are_compiled(monkeypatch):
    begun = []
    monkeypatch.setattr(usual_kernels_module, "compile_together", lambda wanted, calls, *_: begun.append(list(calls)))

    begin_compilation("smoothed_aggregation of 3 unknowns a node, one vector, streamed", CPU)

    assert begun[0][:1] == ["argsort(int32)"]
    assert len(begun[0]) > 1


def test_cupy_compares_by_operators(monkeypatch):
    """Only these are what the first comparison in a solve needs."""
    compared = []

    class Noting(float):
        def __ge__(self, other):
            compared.append(other)

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=lambda count, kind: Noting()))

    evaluate("greater_equal(float64, float)")

    assert compared == [1.0]


def test_calls_of_cupy_that_are_begun_are_not_begun_again(monkeypatch):
    called = []
    monkeypatch.setattr(cuda_module, "_calls", set())
    monkeypatch.setattr(cuda_module, "compile_cupy_kernel", called.append)

    for _ in range(2):
        compile_together([], ["add(int64, int)", "fill(float64)"], 1, CPU)

    for thread in threading.enumerate():
        if thread.name.startswith("penstock-compile"):
            thread.join()
    assert called == ["add(int64, int)", "fill(float64)"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", sorted(usual_kernels()))
def test_cupy_knows_the_functions_that_are_called_ahead(case):
    pytest.importorskip("cupy")

    for call in usual_kernels()[case].get(CUPY, ()):
        evaluate(call)
