"""Kernels are compiled even where nothing can be kept."""

import subprocess
import sys


def test_without_a_folder_for_compiled_code_each_process_compiles():
    code = (
        "from numba.core import caching\n"
        "base = getattr(caching, 'CacheImpl', None) or caching._CacheImpl\n"
        "for kind in (base, *base.__subclasses__()):\n"
        "    kind._locator_classes = []\n"  # as where nothing can be written
        "import numpy as np, scipy.sparse\n"
        "from penstock.spmv import CsrMatrix\n"
        "A = CsrMatrix.from_csr(scipy.sparse.diags_array([1.0, 2.0, 3.0]).tocsr())\n"
        "print((A @ np.ones(3)).tolist())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert ran.stdout == "[1.0, 2.0, 3.0]\n", ran.stderr
