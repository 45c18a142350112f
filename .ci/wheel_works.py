"""Check an installed penstock: a resident solve, a streamed one, an experiment on the command line, and all of its kernels.

Run away from the sources, with their root as the argument: ``python .ci/wheel_works.py ROOT``.
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import numpy as np

import penstock
from penstock.fem import Cantilever

sources = Path(sys.argv[1]).resolve()
assert not Path(penstock.__file__).is_relative_to(sources), penstock.__file__
assert penstock.__version__ == version("penstock")
wanted = [path.relative_to(sources) for path in sources.glob("*/kernels/*.cu*")]
missing = [path for path in wanted if not files("penstock").joinpath(*path.parts).is_file()]
assert wanted, sources
assert not missing, missing
assert (files("penstock") / "py.typed").is_file()

beam = Cantilever(nodes=(9, 5, 5), dof=3)
A, b = beam.matrix(), beam.load("shear")
for memory in (None, "150 KiB"):
    result = penstock.solve(A, b, memory=memory, rtol=1e-8)
    assert result.converged, result
    assert np.linalg.norm(b - A @ result.x) <= 1e-8 * np.linalg.norm(b)
    assert (result.bytes_streamed > 0) == (memory is not None)

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "small.yaml").write_text("model: {nodes: [9, 5, 5]}\nmemory: {budget: 150 KiB}\n", encoding="utf-8")
    command = [Path(sys.executable).with_name("penstock"), "run", "small.yaml", "--output", "out"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(Path(folder, "out", "result.json").read_text(encoding="utf-8"))
    assert result["converged"], result
    assert result["bytes_streamed"] > 0, result
