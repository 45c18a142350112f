"""Field files have the structure that ParaView's VTKHDF reader asks for, and every value at its node."""

import itertools

import h5py
import numpy as np
import pytest

from penstock.fem import BoxMesh, vtkhdf_writer, write_vtkhdf
from penstock.spmv import InputError

MESH = BoxMesh((4, 3, 5), (1.5, 0.5, 3.0))
SCALAR = np.arange(MESH.node_count) * 1.0
VECTOR = np.random.default_rng(2).standard_normal((MESH.node_count, 3))


@pytest.fixture
def root(tmp_path):
    write_vtkhdf(tmp_path / "field.vtkhdf", MESH, {"temperature": SCALAR, "displacement": VECTOR})
    with h5py.File(tmp_path / "field.vtkhdf") as file:
        yield file["VTKHDF"]


def test_the_root_group_names_version_and_type(root):
    kind = root.attrs.get_id("Type").get_type()

    assert root.attrs["Version"].tolist() == [2, 0]
    assert np.issubdtype(root.attrs["Version"].dtype, np.integer)
    assert root.attrs["Type"] in (b"ImageData", "ImageData")
    # The reader compares characters: it takes a fixed-length ASCII string only.
    assert not kind.is_variable_str()
    assert kind.get_cset() == h5py.h5t.CSET_ASCII
    assert kind.get_size() == len("ImageData")


def test_the_image_has_the_extent_and_spacing_of_the_mesh(root):
    assert root.attrs["WholeExtent"].tolist() == [0, 3, 0, 2, 0, 4]
    assert np.issubdtype(root.attrs["WholeExtent"].dtype, np.integer)
    assert root.attrs["Origin"].tolist() == [0.0, 0.0, 0.0]
    assert root.attrs["Spacing"].tolist() == [0.5, 0.25, 0.75]
    assert root.attrs["Direction"].tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert {root.attrs[name].dtype for name in ("Origin", "Spacing", "Direction")} == {np.dtype(np.float64)}


def test_fields_are_point_data_with_x_fastest(root):
    assert set(root["PointData"]) == {"temperature", "displacement"}
    assert root["PointData/temperature"].shape == (5, 3, 4)
    assert root["PointData/displacement"].shape == (5, 3, 4, 3)


def test_the_value_of_every_node_stands_at_its_place(root):
    temperature, displacement = root["PointData/temperature"][:], root["PointData/displacement"][:]

    for ix, iy, iz in itertools.product(range(4), range(3), range(5)):
        node = (ix * 3 + iy) * 5 + iz
        assert temperature[iz, iy, ix] == SCALAR[node]
        assert displacement[iz, iy, ix].tolist() == VECTOR[node].tolist()


@pytest.mark.parametrize("cuts", [[2], [1, 2, 3]])
def test_planes_that_come_one_after_another_are_the_same_file(root, cuts, tmp_path):
    plane = MESH.node_count // 4
    parts = np.split(np.arange(4), cuts)
    with vtkhdf_writer(tmp_path / "parts.vtkhdf", MESH) as write:
        for part in parts:
            rows = slice(part[0] * plane, (part[-1] + 1) * plane)
            write({"temperature": SCALAR[rows], "displacement": VECTOR[rows]})

    with h5py.File(tmp_path / "parts.vtkhdf") as file:
        for name in ("temperature", "displacement"):
            assert np.array_equal(file["VTKHDF/PointData"][name], root["PointData"][name])
        assert dict(file["VTKHDF"].attrs).keys() == dict(root.attrs).keys()


def test_coordinates_written_as_a_field_are_where_the_image_puts_its_points(tmp_path):
    write_vtkhdf(tmp_path / "field.vtkhdf", MESH, {"position": MESH.coordinates()})

    with h5py.File(tmp_path / "field.vtkhdf") as file:
        spacing, positions = file["VTKHDF"].attrs["Spacing"], file["VTKHDF/PointData/position"][:]
    for index in np.ndindex(5, 3, 4):
        np.testing.assert_allclose(positions[index], np.array(index[::-1]) * spacing, rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_the_type_of_a_field_is_kept(tmp_path, dtype):
    write_vtkhdf(tmp_path / "field.vtkhdf", MESH, {"part": SCALAR.astype(dtype)})

    with h5py.File(tmp_path / "field.vtkhdf") as file:
        assert file["VTKHDF/PointData/part"].dtype == dtype


def test_a_file_is_replaced(tmp_path):
    write_vtkhdf(tmp_path / "field.vtkhdf", MESH, {"old": SCALAR})

    write_vtkhdf(str(tmp_path / "field.vtkhdf"), MESH, {"new": SCALAR})

    with h5py.File(tmp_path / "field.vtkhdf") as file:
        assert list(file["VTKHDF/PointData"]) == ["new"]


def test_a_field_of_another_length_than_the_mesh_is_refused_by_name_and_leaves_no_file(tmp_path):
    """The unknowns of a solution in one vector are the likely mistake."""
    with pytest.raises(InputError, match=r"displacement.*180.*60"):
        write_vtkhdf(tmp_path / "field.vtkhdf", MESH, {"temperature": SCALAR, "displacement": VECTOR.ravel()})

    assert not (tmp_path / "field.vtkhdf").exists()
