"""
A field for ParaView
====================

``write_vtkhdf`` writes nodal fields in a format that ParaView and PyVista open. Where PyVista is installed it draws the body;
without it, the file is read with h5py and drawn with Matplotlib.
"""

import importlib.util
import tempfile
from pathlib import Path

import h5py
import matplotlib.pyplot as plt
import numpy as np

from penstock.fem import Cantilever, TwoPhaseMaterial, write_vtkhdf
from penstock.solvers import cg, smoothed_aggregation

body = Cantilever(nodes=(25, 13, 13), dof=3, lengths=2.0, material=TwoPhaseMaterial(contrast=50.0))
A, b = body.matrix(), body.load("torsion")
result = cg(A, b, M=smoothed_aggregation(A, coordinates=body.mesh.coordinates()), rtol=1e-8)
assert np.linalg.norm(b - A @ result.x) <= 1e-8 * np.linalg.norm(b)
displacement = result.x.reshape(-1, 3)

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "torsion.vtkhdf"
write_vtkhdf(path, body.mesh, {"displacement": displacement})

# %%
if importlib.util.find_spec("pyvista"):
    import pyvista

    grid = pyvista.read(path)
    read = np.asarray(grid["displacement"])
    factor = 0.3 / np.abs(read).max()
    bent = grid.cast_to_unstructured_grid().warp_by_vector("displacement", factor=factor)
    bent["size"] = np.linalg.norm(bent["displacement"], axis=1)
    plotter = pyvista.Plotter(off_screen=True, window_size=(1200, 800))
    plotter.add_mesh(bent, scalars="size", show_edges=True, scalar_bar_args={"title": "displacement", "vertical": True})
    plotter.camera.zoom(1.2)
    picture = plotter.screenshot(return_img=True)
    plotter.close()
    figure, axes = plt.subplots(figsize=(7.2, 4.8), layout="constrained")
    axes.imshow(picture)
    axes.set_axis_off()
else:
    with h5py.File(path) as file:
        root = file["VTKHDF"]
        field = root["PointData/displacement"][...]  # (nz, ny, nx, 3): x runs fastest in VTK
        spacing = root.attrs["Spacing"]
    read = field.reshape(-1, 3)
    end = field[:, :, -1, :]  # the loaded face
    y, z = np.meshgrid(np.arange(end.shape[1]) * spacing[1], np.arange(end.shape[0]) * spacing[2])
    factor = 0.3 / np.abs(end).max()
    figure, axes = plt.subplots(figsize=(5, 4.4), layout="constrained")
    axes.pcolormesh(y, z, np.zeros_like(y), shading="gouraud", cmap="Greys", alpha=0.3)
    moved = axes.pcolormesh(
        y + factor * end[..., 1], z + factor * end[..., 2], np.linalg.norm(end, axis=-1), shading="gouraud"
    )
    axes.set(title="The loaded face, twisted", xlabel="y", ylabel="z", aspect="equal")
    figure.colorbar(moved, label="displacement")
folder.cleanup()
assert np.isclose(np.abs(read).max(), np.abs(displacement).max())
plt.show()
