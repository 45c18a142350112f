"""Pictures of products: what they draw is what the records say."""

import matplotlib.colors
import numpy as np
import pytest

from penstock.experiments.formats import figures as product_figures
from penstock.experiments.formats.figures import (
    figure_block_sizes,
    figure_fraction_of_roofline,
    figure_gflops_by_nonzeros,
    figure_performance_profile,
    figure_row_length_band,
    figure_scalar_against_vector,
    figure_setup_cost,
    figure_sorting_scope,
    figure_speedup_by_imbalance,
    figure_unified_sell,
    write_product_figures,
)

pytestmark = pytest.mark.usefixtures("rendered_pictures")

LIMITS = {"read_GBps": 1000.0}
NAMES = [
    "gflops_by_nonzeros", "speedup_by_imbalance", "scalar_against_vector", "block_sizes", "setup_cost", "sorting_scope",
    "unified_sell", "row_length_band", "performance_profile", "fraction_of_roofline",
]  # fmt: skip
FIGURES = [getattr(product_figures, f"figure_{name}") for name in NAMES]
CSR, SELL = "CSR", r"SELL-C-$\sigma$"
GRID_SECONDS = {(8, 1): 4e-6, (32, 1): 8e-6, (32, 64): 5e-6, (32, 1024): 6e-6}
THREAD_SECONDS = {128: 6e-6, 256: 5e-6, 512: 4e-6}


def record(matrix, format_name, seconds, *, rows=1000, nonzeros=10_000, columns=1, **more):
    """Make a record with the keys that none lacks, and those given."""
    shape = {"name": matrix, "rows": rows, "columns": rows, "nonzeros": nonzeros, "longest_row": rows // 10}
    return {
        "name": f"spmv/{format_name}/{matrix}", "format": format_name, "matrix": shape, "columns": columns,
        "seconds": seconds, "bytes": 12 * nonzeros, **more,
    }  # fmt: skip


def complete(matrices=("web", "mesh", "circuit"), formats=("csr", "sell")):
    """Make records that hold data for every picture."""
    records = []
    for number, matrix in enumerate(matrices, start=1):
        size = {"rows": 1000 * number, "nonzeros": 8000 * number}
        for format_name in formats:
            more = {
                "peers": {"cusparse_csr": 7e-6},
                "peer_setup_seconds": {"cusparse_csr": 21e-6},
                "setup_products": 9.0,
            }
            records.append(record(matrix, format_name, number * 5e-6, **size, **more))
            records.append(record(matrix, format_name, number * 9e-6, columns=16, **size))
            records += [
                record(matrix, format_name, seconds, threads=threads, variant=f"threads{threads}", **size)
                for threads, seconds in THREAD_SECONDS.items()
            ]
        records += [
            record(matrix, "csr", seconds, variant=v, **size) for v, seconds in (("scalar", 3e-6), ("vector", 2e-6))
        ]
        records += grid(matrix)
    return records


def grid(matrix="web", **more):
    return [
        record(
            matrix, "sell", seconds, variant=f"C{chunk}-sigma{scope}", occupancy=0.5 + scope / 4096, alpha=0.25,
            parameters={"chunk_height": chunk, "sorting_scope": scope, "lanes": 1}, **more,
        )
        for (chunk, scope), seconds in GRID_SECONDS.items()
    ]  # fmt: skip


def lines(axes):
    """Return the drawn lines as points by label."""
    return {line.get_label(): np.column_stack([line.get_xdata(), line.get_ydata()]) for line in axes.get_lines()}


def bars(axes, horizontal=False):
    """Return the drawn bars as lengths by label."""
    size = "get_width" if horizontal else "get_height"
    return {group.get_label(): [getattr(bar, size)() for bar in group] for group in axes.containers}


def test_all_pictures_are_written_under_fixed_names(tmp_path):
    paths = write_product_figures(complete(), LIMITS, tmp_path / "made" / "here")

    assert paths == [tmp_path / "made" / "here" / f"{name}.png" for name in NAMES]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_only_pictures_with_data_are_written(tmp_path):
    paths = write_product_figures([record("web", "csr", 1e-5)], {}, tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {"gflops_by_nonzeros.png"}
    assert paths == list(tmp_path.iterdir())


@pytest.mark.parametrize("draw", FIGURES, ids=NAMES)
def test_without_suitable_records_there_is_no_picture(draw):
    assert draw([], LIMITS) is None
    assert draw([record("web", "bsr", 1e-5, variant="odd")], {}) is None


@pytest.mark.parametrize("draw", FIGURES, ids=NAMES)
def test_optional_keys_may_be_missing_or_null(draw):
    optional = {key for item in complete() for key in item} - set(record("web", "csr", 1.0))
    assert optional >= {"peers", "parameters", "threads", "alpha", "occupancy", "setup_products"}
    for key in optional:
        draw([{name: value for name, value in item.items() if name != key} for item in complete()], LIMITS)
        draw([{**item, key: None} for item in complete()], LIMITS)


@pytest.mark.parametrize("draw", FIGURES, ids=NAMES)
@pytest.mark.parametrize("formats", [("csr",), ("sell",), ("csr", "my_own_format")])
def test_one_matrix_or_one_format_is_enough(draw, formats):
    assert (draw(complete(("web",), formats), LIMITS) is None) == (draw is figure_performance_profile)
    assert draw(complete(formats=formats), LIMITS) is not None


def test_gflops_are_those_of_default_variants_with_one_vector():
    records = [
        record("web", "csr", 2e-5, peers={"scipy_csr": 4e-5}),
        record("web", "csr", 1e-5, variant="vector", peers={"scipy_csr": 5e-5}),
        record("web", "csr", 1e-5, threads=512),
        record("web", "csr", 1e-5, columns=16, peers={"scipy_csr": 1e-6}),
        record("big", "csr", 1e-5, nonzeros=50_000),
    ]
    drawn = lines(figure_gflops_by_nonzeros(records, {}).axes[0])

    np.testing.assert_allclose(drawn[CSR], [[10_000, 1.0], [50_000, 10.0]])
    np.testing.assert_allclose(drawn["SciPy CSR"], [[10_000, 0.5]])


def test_speedup_is_over_cusparse_where_it_was_measured():
    records = [
        record("web", "csr", 2e-5, peers={"scipy_csr": 1.0, "cusparse_csr": 8e-5}),
        record("web", "sell", 1e-5),
        record("mesh", "sell", 1e-5, peers={"scipy_csr": 1.0}),
    ]
    axes = figure_speedup_by_imbalance(records, {}).axes[0]
    drawn = lines(axes)

    np.testing.assert_allclose(drawn[CSR], [[0.1, 4.0]])
    np.testing.assert_allclose(drawn[SELL], [[0.1, 8.0]])
    assert drawn["as fast as cuSPARSE CSR"][:, 1].tolist() == [1, 1]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_speedup_is_over_scipy_where_that_is_all_there_is():
    drawn = lines(figure_speedup_by_imbalance([record("web", "csr", 2e-5, peers={"scipy_csr": 1e-5})], {}).axes[0])

    np.testing.assert_allclose(drawn[CSR], [[0.1, 0.5]])


def test_vector_over_scalar_divides_the_right_way():
    records = [
        record("web", "csr", 3e-5, variant="scalar"),
        record("web", "csr", 1e-5, variant="vector"),
        record("mesh", "csr", 1e-5, variant="scalar"),
    ]
    axes = figure_scalar_against_vector(records, {}).axes[0]

    np.testing.assert_allclose(lines(axes)[CSR], [[10_000, 3.0]])
    assert "1 of 1" in axes.get_title()


def test_block_sizes_are_relative_to_256_threads():
    figure = figure_block_sizes(complete(("web", "mesh")), {})

    assert [axes.get_title(loc="left") for axes in figure.axes] == [CSR, SELL]
    for axes in figure.axes:
        drawn = bars(axes)
        assert list(drawn) == ["128 threads", "256 threads", "512 threads"]
        np.testing.assert_allclose(drawn["128 threads"], [1.2, 1.2])
        np.testing.assert_allclose(drawn["256 threads"], [1.0, 1.0])
        np.testing.assert_allclose(drawn["512 threads"], [0.8, 0.8])


def test_block_sizes_keep_kernels_apart_and_leave_out_what_has_no_base():
    records = [
        record("web", "csr", 4e-6, threads=256),
        record("web", "csr", 2e-6, threads=512),
        record("web", "csr", 4e-6, threads=256, variant="vector-256"),
        record("web", "csr", 8e-6, threads=512, variant="vector-512"),
        record("mesh", "csr", 8e-6, threads=512),
        record("mesh", "csr", 8e-6, threads=128),
    ]
    panels = figure_block_sizes(records, {}).axes

    assert [axes.get_title(loc="left") for axes in panels] == ["CSR", "CSR, vector"]
    assert [bars(axes)["512 threads"] for axes in panels] == [[0.5], [2.0]]
    assert figure_block_sizes(records[4:], {}) is None


def test_setup_is_in_products_and_shows_the_vendors_analysis():
    records = [
        record("web", "csr", 2e-5, peers={"cusparse_csr": 1e-5}, peer_setup_seconds={"cusparse_csr": 3e-5}),
        record("web", "sell", 2e-5, setup_products=40.0, setup_seconds=1.0),
        record("web", "ell", 2e-5, setup_seconds=1e-4),
        record("web", "coo", 2e-5, setup_seconds=0.0),
    ]
    axes = figure_setup_cost(records, {}).axes[0]
    drawn = bars(axes)

    assert set(drawn) == {SELL, "ELL", "cuSPARSE CSR, analysis"}
    assert [*drawn[SELL], *drawn["ELL"], *drawn["cuSPARSE CSR, analysis"]] == pytest.approx([40, 5, 3])
    assert axes.get_yscale() == "log"
    assert 0 < axes.get_ylim()[0] < 3


def test_sorting_scope_draws_chunk_height_32_in_three_panels():
    panels = figure_sorting_scope(grid(), {}).axes
    occupancy, alpha, microseconds = (lines(axes)["web (C = 32)"] for axes in panels)

    np.testing.assert_allclose(occupancy, [[1, 0.5 + 1 / 4096], [64, 0.515625], [1024, 0.75]])
    np.testing.assert_allclose(alpha[:, 1], 0.25)
    np.testing.assert_allclose(microseconds, [[1, 8], [64, 5], [1024, 6]])
    assert panels[0].get_xscale() == "log"
    assert figure_sorting_scope(grid()[:2], {}) is None


def test_sorting_scope_falls_back_to_the_chunk_height_with_most_scopes():
    records = [
        {**item, "parameters": {**item["parameters"], "chunk_height": 64}} for item in grid() if item["seconds"] < 8e-6
    ]

    assert list(lines(figure_sorting_scope(records, {}).axes[2])) == ["web (C = 64)"]


def test_unified_sell_is_against_the_best_of_all():
    records = [*grid(), record("web", "csr", 1e-5, peers={"cusparse_csr": 1e-5})]
    axes = figure_unified_sell(records, {}).axes[0]
    drawn = bars(axes)

    assert drawn[r"C = 32, best $\sigma$"] == pytest.approx([2.0])
    assert drawn[r"best C and $\sigma$"] == pytest.approx([2.5])
    assert "at most 20%" in axes.get_title()
    assert figure_unified_sell(records[1:], {}) is None  # nothing but C = 32
    assert figure_unified_sell(records[:-1], {}) is None  # no vendor


def test_band_is_that_of_the_model():
    records = [record("web", "csr", 1e-5), record("web", "sell", 2e-5), record("web", "ell", 2e-5)]
    drawn = lines(figure_row_length_band(records, LIMITS).axes[0])

    once, each = drawn[r"x loaded once, $\alpha$ = 1 / mean"], drawn[r"x loaded each time, $\alpha$ = 1"]
    assert once[0, 0] <= 1 < 10 < once[-1, 0]
    np.testing.assert_allclose(once[:, 1], 1000 / ((12 + 8 / once[:, 0] + 8 / once[:, 0]) / 2))
    np.testing.assert_allclose(each[:, 1], 1000 / ((12 + 8 + 8 / each[:, 0]) / 2))
    np.testing.assert_allclose([drawn[CSR][0], drawn[SELL][0]], [[10, 2.0], [10, 1.0]])
    assert len(drawn) == 4
    assert figure_row_length_band(records, {}) is None


def test_profile_counts_matrices_within_a_factor_of_the_fastest():
    records = [
        record("a", "csr", 1.0), record("a", "sell", 2.0), record("a", "ell", 1.5, peers={"cusparse_csr": 4.0}),
        record("b", "csr", 3.0), record("b", "sell", 1.0, peers={"cusparse_csr": 1.0}),
        record("c", "csr", 2.0), record("c", "sell", 4.0, peers={"cusparse_csr": 1.0}),
        record("d", "csr", 9.0), record("d", "sell", 1.0, peers={"cusparse_csr": 2.0}),
    ]  # fmt: skip
    drawn = lines(figure_performance_profile(records, {}).axes[0])

    assert drawn[CSR].tolist() == [[1, 25], [2, 50], [3, 75], [5, 75]]
    assert drawn[SELL].tolist() == [[1, 50], [2, 75], [4, 100], [5, 100]]
    assert drawn["cuSPARSE CSR"].tolist() == [[1, 50], [2, 75], [4, 100], [5, 100]]
    assert drawn["ELL"].tolist() == [[1, 0], [1.5, 25], [5, 25]]  # infinitely slow where it is missing


def test_profile_needs_three_matrices_and_two_competitors():
    assert figure_performance_profile([record(m, f, 1.0) for m in "ab" for f in ("csr", "sell")], {}) is None
    assert figure_performance_profile([record(m, "csr", 1.0) for m in "abc"], {}) is None


def test_fraction_is_the_floor_over_the_time_for_each_number_of_vectors():
    records = [
        record("web", "csr", 4e-6, floor_seconds=1e-6),
        record("web", "csr", 2e-6, floor_seconds=1e-6, columns=16),
        record("mesh", "csr", 1e-3),  # 120 kB at 1000 GB/s
        record("web", "csr", 1e-6, floor_seconds=1e-6, variant="vector"),
    ]
    single, block = figure_fraction_of_roofline(records, LIMITS).axes

    assert (single.get_title(), block.get_title()) == ("one vector", "16 vectors")
    assert bars(single, horizontal=True)[CSR] == pytest.approx([0.25, 1.2e-4])
    assert bars(block, horizontal=True)[CSR] == pytest.approx([0.5])
    assert [label.get_text() for label in single.get_yticklabels()] == ["web", "mesh"]


def test_many_matrices_are_counted_and_not_named():
    axes = figure_setup_cost([record(f"m{n}", "ell", 1.0, setup_products=2.0) for n in range(25)], {}).axes[0]

    assert len(axes.get_xticks()) == 0
    assert axes.get_xlabel() == "25 matrices"
    assert len(axes.containers[0]) == 25


def test_a_format_has_one_colour_of_its_own_in_all_pictures():
    records = complete()
    points = {line.get_label(): line.get_color() for line in figure_gflops_by_nonzeros(records, {}).axes[0].get_lines()}
    steps = {line.get_label(): line.get_color() for line in figure_performance_profile(records, {}).axes[0].get_lines()}
    fraction = figure_fraction_of_roofline(records, LIMITS).axes[0]
    patches = {group.get_label(): matplotlib.colors.to_hex(group[0].get_facecolor()) for group in fraction.containers}

    assert points == steps
    assert len(set(points.values())) == 3
    assert patches == {label: points[label] for label in (CSR, SELL)}
