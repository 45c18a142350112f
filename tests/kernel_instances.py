"""The kernel instantiations that the library can ask for, by source: all are compiled, and enough of them are emulated.

``INSTANCES`` holds every one: they are compiled to PTX. ``ENDS`` holds the first and the last of every kernel: what
architectures compile to machine code. ``EMULATED`` holds those that tests
launch under the emulator: every kernel with every pair of template arguments that some test needs, but not the whole product
of block sizes, columns and types. What a test launches besides is compiled on its own, which takes a second each.
"""

import re
from itertools import product

from penstock.fem.box_rows import BOX_ROW_KERNELS
from penstock.fem.element_rows import ELEMENT_ROW_KERNELS, PHYSICS, SHAPES
from penstock.fem.row_layouts import LAYOUTS
from penstock.solvers.amg.aggregates import AGGREGATION_KERNELS
from penstock.solvers.amg.bisection import BISECTION_KERNELS
from penstock.solvers.amg.group_factors import GROUP_FACTOR_KERNELS
from penstock.solvers.amg.lines import LINE_KERNELS
from penstock.solvers.amg.links import LINK_KERNELS
from penstock.solvers.amg.modes import MOTION_KERNELS
from penstock.solvers.amg.tentative import AGGREGATE_KERNELS
from penstock.solvers.cg_kernels import CG_KERNELS
from penstock.solvers.preconditioners import DIAGONAL_BLOCK_KERNELS
from penstock.solvers.triangular.block_entries import ORDER_KERNELS
from penstock.solvers.triangular.block_entries import SIZES as TRIANGLE_SIZES
from penstock.solvers.triangular.dataflow_schedule import dataflow_shapes
from penstock.solvers.triangular.factor_rows import CHOLESKY_KERNELS
from penstock.solvers.triangular.level_schedule import LEVEL_LANES
from penstock.solvers.triangular.levels import TRIANGLE_KERNELS
from penstock.spmv.formats.bsr import BSR_KERNELS
from penstock.spmv.formats.chunk_products import SELL_KERNELS, spmm_tile, spmv_expression
from penstock.spmv.formats.coo import COO_KERNELS
from penstock.spmv.formats.csr import CSR_KERNELS
from penstock.spmv.formats.ell import ELL_KERNELS
from penstock.spmv.formats.survey import CONVERSION_KERNELS
from penstock.spmv.formats.symmetric_bsr import SYMMETRIC_BSR_KERNELS
from penstock.spmv.products.block_products import BLOCK_PRODUCT_KERNELS, teams_for
from penstock.spmv.products.block_rows import BLOCK_ROW_KERNELS
from penstock.spmv.products.hashing import BLOCK_LANES, PARTS, PRODUCT_KERNELS
from penstock.spmv.products.hashing import LANES as HASH_LANES
from penstock.spmv.products.mirrored_rows import MIRRORED_ROW_KERNELS
from penstock.spmv.vectors.block_space import BLOCK_VECTOR_KERNELS, FUSED_TILES, TILES, gram_parts
from penstock.spmv.vectors.space import VECTOR_KERNELS
from penstock.streaming.stores.planes import PLANE_KERNELS

TYPES = ("double, double", "float, double", "float, float")  # stored values, vectors
IMAGE = "short, double"
OFFSETS = ("int", "long long")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
LANES = (1, 2, 4, 8, 16, 32)
SIZES = range(1, 9)
COLUMNS = (2, 4, 8, 16, 32)
ITEMSIZE = {"double": 8, "float": 4}


def _csr() -> list[str]:
    names = [", ".join(pair) for pair in product(TYPES, OFFSETS)]
    return [
        *(
            f"{kernel}<{types}, {count}>"
            for kernel in ("csr_spmv", "csr_spmv_shared")
            for types in names
            for count in LANES
        ),
        *(
            f"{kernel}<{types}>"
            for kernel in ("csr_spmv_balanced", "csr_spmm", "csr_diagonal_blocks")
            for types in names
        ),
        *(f"csr_join_tiles<{vector}, {offset}>" for vector in ITEMSIZE for offset in OFFSETS),
    ]


def _bsr() -> list[str]:
    names = [", ".join(pair) for pair in product(TYPES, OFFSETS)]
    kernels = ("bsr_spmv", "bsr_spmm", "bsr_diagonal_blocks")
    return [f"{kernel}<{types}, {size}>" for kernel, types, size in product(kernels, names, SIZES)]


def _mirrored_rows(sizes) -> list[str]:
    plain = ("count_mirrored", "count_waiting", "add_counts", "list_mirrored", "list_waiting", "sort_mirrored")
    kernels = product(("fill_mirrored", "keep_mirrored"), ("double", "float", "short"), sizes)
    return [*plain, *(f"{kernel}<{value}, {size}>" for kernel, value, size in kernels)]


def _sell_spmm(types: str, size: int, columns: int) -> list[str]:
    value, vector = types.split(", ")
    tile = spmm_tile(size, columns, ITEMSIZE[value], ITEMSIZE[vector])
    return [tile.expression(types, size, columns, plain) for plain in (True, False)]


def _sell(sizes, columns) -> list[str]:
    return [
        *(spmv_expression(types, size) for types in TYPES for size in sizes),
        *(f"sell_spmv_lanes<{types}>" for types in TYPES),
        *(f"sell_spmm_any<{types}, {size}>" for types in TYPES for size in sizes),
        *(name for types in TYPES for size in sizes for count in columns for name in _sell_spmm(types, size, count)),
    ]


def _sell_of(sizes) -> list[str]:
    """All sizes of blocks with 8 columns, and all numbers of columns with two sizes."""
    names = [
        *_sell(sizes, ()),
        *(name for types in TYPES for size in sizes for name in _sell_spmm(types, size, 8)),
        *(name for types in TYPES for size in (1, 3) for count in COLUMNS for name in _sell_spmm(types, size, count)),
    ]
    return list(dict.fromkeys(names))


def _coo() -> list[str]:
    return [f"{kernel}<{types}>" for kernel in ("coo_spmv", "coo_spmm") for types in TYPES]


def _ell() -> list[str]:
    return [
        *(f"ell_spmv<{types}, {adds}>" for types in TYPES for adds in ("false", "true")),
        *(f"ell_spmv_lanes<{types}, {lanes}>" for types in TYPES for lanes in LANES),
        *(f"ell_spmm<{types}>" for types in TYPES),
    ]


def _box_rows(values, dofs) -> list[str]:
    layouts = {name: f"{layout.name}, {str(name == 'symmetric_bsr').lower()}" for name, layout in LAYOUTS.items()}
    offsets = {name: ("long long",) if "CHUNKS" in layout else OFFSETS[::-1] for name, layout in layouts.items()}
    return [
        f"box_rows<{value}, {offset}, {dof}, {layouts[name]}>"
        for value, dof, name in product(values, dofs, layouts)
        for offset in offsets[name]
    ]


def _element_rows() -> list[str]:
    layouts = (
        "int, BLOCK_ROWS, false",
        "long long, BLOCK_ROWS, false",
        "long long, CHUNKS, false",
        "long long, CHUNKS, true",
    )
    kinds = product(SHAPES.values(), PHYSICS.values(), layouts)
    return [f"element_rows<{shape}, {physics}, {layout}>" for shape, physics, layout in kinds]


def _symmetric(sizes) -> list[str]:
    products = ("symmetric_bsr_spmv", "symmetric_bsr_spmm")
    of_products = [f"{kernel}<{types}, {size}>" for kernel in products for types in (*TYPES, IMAGE) for size in sizes]
    stored = [types.split(", ") for types in (*TYPES, IMAGE)]
    stand_ins = [f"Absolute<{value}>, {vector}" for value, vector in stored]
    stand_ins += [f"Rounding<{value}>, double" for value in ("float", "short")]
    of_products += [f"symmetric_bsr_spmv<{types}, {size}>" for types in stand_ins for size in sizes]
    return [*of_products, *(f"symmetric_bsr_diagonal<{types}, {size}>" for types in TYPES for size in sizes)]


def _conversion(sizes) -> list[str]:
    values = ("double, double", "float, double", "float, float")  # stored, source
    sources = [", ".join(pair) for pair in product(values, OFFSETS)]
    return [
        *(f"fill_slots<{names}>" for names in sources),
        *(f"count_blocks<{offset}, {size}>" for offset in OFFSETS for size in sizes),
        *(f"fill_blocks<{names}, {size}>" for names in sources for size in sizes),
        *(f"survey<{bits}, {offset}>" for bits in ("long long", "int") for offset in OFFSETS),
        *(f"scalar_rows<{value}>" for value in ITEMSIZE),
        *(f"checksums<{index}>" for index in OFFSETS),
        *(
            f"{kernel}<{pair[0]}, {pair[1]}>"
            for kernel in ("root_of_diagonal", "compare_mirrors")
            for pair in product(ITEMSIZE, OFFSETS)
        ),
    ]


def _vectors(sizes) -> list[str]:
    return [
        "fill_noise",
        *(f"{kernel}<{type_}>" for kernel, type_ in product(("dot_partial", "combine"), ITEMSIZE)),
        *(
            f"{kernel}<{type_}, {size}>"
            for kernel, type_, size in product(("three_terms", "three_terms_of_block"), ITEMSIZE, sizes)
        ),
    ]


def _diagonal_blocks(sizes) -> list[str]:
    inverting = (f"invert_blocks<{type_}, {size}>" for type_, size in product(ITEMSIZE, sizes))
    return [*inverting, *(f"measure_blocks<{type_}>" for type_ in ITEMSIZE)]


def _conjugate_gradients(sizes) -> list[str]:
    passes = ("cg_curvature", "cg_residual_product", "cg_extend", "cg_extend_image")
    return [
        "cg_close",
        "cg_foresee",
        *(f"{kernel}<{type_}>" for kernel, type_ in product(passes, ITEMSIZE)),
        *(f"cg_descend<{type_}, {size}>" for type_, size in product(ITEMSIZE, sizes)),
    ]


def _block_vectors(tiles) -> list[str]:
    pairs = list(product(ITEMSIZE, tiles))
    return [
        "block_sum",
        *(f"block_gram<{type_}, {count}, {gram_parts(count)}>" for type_, count in pairs),
        *(f"block_extend<{type_}, {count}>" for type_, count in pairs),
        *(
            f"block_descend<{type_}, {count}, {grams}>"
            for type_, count in pairs
            for grams in ((1, 2) if count <= FUSED_TILES else (0,))
        ),
    ]


def _block_products(pairs) -> list[str]:
    """Products of A with a prolongator, and of its transpose with those, for pairs of a block size and a number of modes."""
    products = [(size, size, count) for size, count in pairs] + [(count, size, count) for size, count in pairs]
    multiply = [
        f"multiply_blocks<{h}, {i}, {a}, {team.template}>" for h, i, a in products for team in teams_for(h, i, a)
    ]
    return [*dict.fromkeys(multiply), *(f"smooth_block_rows<{size}, {count}>" for size, count in pairs)]


def _triangular(types, sizes) -> list[str]:
    sized = [f"{names}, {size}" for names, size in product(types, sizes)]
    by_lanes = [
        *(f"substitute<{n}, {lanes}, {held}>" for n in sized for lanes, held in dataflow_shapes(int(n.split(", ")[2]))),
        *(f"substitute_level<{names}, {lanes}>" for names, lanes in product(sized, LEVEL_LANES)),
        *(f"substitute_narrow_levels<{names}, {lanes}>" for names, lanes in product(sized, LEVEL_LANES)),
    ]
    words = [f"forget<{word}>" for word in ("double", "int")]
    colours = [f"colour_rows<{lanes}>" for lanes in (1, 8)]
    return [*by_lanes, *(f"substitute_columns<{names}>" for names in types), *words, *colours]


def _solve_order(sizes) -> list[str]:
    return [
        "count_waits",
        "find_unpaired",
        "list_followers",
        "key_levels",
        "list_entries",
        *(f"find_levels<{lanes}>" for lanes in (1, 8)),
        *(f"find_not_finite<{value}>" for value in ITEMSIZE),
        *(f"invert_diagonal<{value}, {size}>" for value, size in product(ITEMSIZE, sizes)),
    ]


def _products(values) -> list[str]:
    ways = [("double", 0), ("double", 1), *((value, 2) for value in values)]
    return [
        "bound_rows",
        "bin_rows",
        "list_rows",
        *(f"hash_rows<{value}, {lanes}, {purpose}>" for value, purpose in ways for lanes in (*HASH_LANES, BLOCK_LANES)),
        *(f"dense_rows<{value}, {purpose}, 1>" for value, purpose in ways),
        *(f"dense_rows<{value}, 2, {PARTS}>" for value in values),
    ]


# One template each, so a few of the many combinations stand for all; the rest would take a minute to compile.
_PAIRS = (*product((1, 3, 6, 8), (1, 6, 8)), (3, 3))

INSTANCES = {
    AGGREGATION_KERNELS: [
        *(
            "make_keys",
            "mark_coupled",
            "find_largest",
            "decide",
            "join_aggregates",
            "mark_roots",
            "label_roots",
            "place_others",
        ),
        *("measure_diagonal", "count_strong", "list_strong"),
    ],
    BISECTION_KERNELS: [
        "make_sortable",
        "follow_order",
        "rank_nodes",
        "find_extents",
        "choose_axes",
        "number_parts",
        *(f"{kernel}<{key}>" for kernel in ("make_part_keys", "take_nodes") for key in OFFSETS),
    ],
    AGGREGATE_KERNELS: [
        f"{kernel}<{modes}>" for kernel in ("prolong", "restrict_rows", "orthonormalise") for modes in SIZES
    ],
    BLOCK_PRODUCT_KERNELS: _block_products(_PAIRS),
    BLOCK_ROW_KERNELS: [
        *(
            "number_rows",
            "begin_groups",
            "count_halves",
            "join_halves",
            "replace_vanishing",
            "count_rows_with_entries",
            "order_rows",
        ),
        *(f"transpose_blocks<{value}>" for value in ("double", "float")),
    ],
    BLOCK_VECTOR_KERNELS: _block_vectors(TILES),
    BOX_ROW_KERNELS: _box_rows(ITEMSIZE, (1, 3, 6)),
    BSR_KERNELS: _bsr(),
    CG_KERNELS: _conjugate_gradients((0, *SIZES)),
    CONVERSION_KERNELS: _conversion(SIZES),
    COO_KERNELS: _coo(),
    CSR_KERNELS: _csr(),
    DIAGONAL_BLOCK_KERNELS: _diagonal_blocks(SIZES),
    ELL_KERNELS: _ell(),
    ELEMENT_ROW_KERNELS: _element_rows(),
    GROUP_FACTOR_KERNELS: ["group_step", "group_solve"],
    LINE_KERNELS: [
        f"{name}<{size}>"
        for name in ("factorise_lines", "step_short_lines", "step_long_lines", "solve_pairs")
        for size in SIZES
    ],
    LINK_KERNELS: ["scale_unknowns", "find_flat", "count_links", "list_links"],
    CHOLESKY_KERNELS: [f"factor_rows<{size}>" for size in TRIANGLE_SIZES],
    PLANE_KERNELS: ["join_planes"],
    PRODUCT_KERNELS: _products(ITEMSIZE),
    MIRRORED_ROW_KERNELS: _mirrored_rows(SIZES),
    MOTION_KERNELS: [
        *(
            f"{kernel}<{size}>"
            for kernel in ("move_nodes", "sum_loads", "motion_blocks", "factor_motions")
            for size in (3, 6)
        ),
        *(f"apply_factors<{transposed}>" for transposed in ("false", "true")),
        *("sum_coordinates", "centre_coordinates"),
    ],
    SELL_KERNELS: _sell_of(SIZES),
    ORDER_KERNELS: _solve_order(TRIANGLE_SIZES),
    SYMMETRIC_BSR_KERNELS: _symmetric(SIZES),
    TRIANGLE_KERNELS: _triangular(TYPES, TRIANGLE_SIZES),
    VECTOR_KERNELS: _vectors(SIZES),
}

# No test launches these under the emulator.
_NOT_LAUNCHED = {
    AGGREGATE_KERNELS: r"<[24578]>",
    BSR_KERNELS: r", [457]>|^bsr_diagonal_blocks<(float|double, double, long)",
    CONVERSION_KERNELS: r"^fill_blocks<(double, double, int|float, float, long|float, double, [a-z ]+, [126]>)",
    CSR_KERNELS: r"^csr_diagonal_blocks<(float|double, double, long)|<float.*, (4|8|32)>",
    ELL_KERNELS: r"^ell_spmv_lanes<.*, (1|2|8|16|32)>",
    LINE_KERNELS: r"<[4578]>",
    SELL_KERNELS: r"^sell_spmm<\w+, \w+, [26], .*false>",
    TRIANGLE_KERNELS: r"^substitute_level<(?!double, double, 1, 1>)",
}
_EMULATED_SIZES = (1, 2, 3, 6)
_EMULATED = {
    **INSTANCES,
    BLOCK_PRODUCT_KERNELS: _block_products(((1, 1), (2, 1), (2, 2), (3, 6))),
    BLOCK_VECTOR_KERNELS: _block_vectors((1, 2, 8)),
    CG_KERNELS: _conjugate_gradients((0, 1, 3)),
    CONVERSION_KERNELS: _conversion(_EMULATED_SIZES),
    DIAGONAL_BLOCK_KERNELS: _diagonal_blocks(_EMULATED_SIZES),
    MIRRORED_ROW_KERNELS: _mirrored_rows((1, 3)),
    SYMMETRIC_BSR_KERNELS: _symmetric(_EMULATED_SIZES),
    TRIANGLE_KERNELS: list(dict.fromkeys([*_triangular(TYPES[:1], TRIANGLE_SIZES), *_triangular(TYPES, (1,))])),
    VECTOR_KERNELS: _vectors(_EMULATED_SIZES),
    SELL_KERNELS: _sell_of(_EMULATED_SIZES),
}
EMULATED = {
    source: [name for name in names if not re.search(_NOT_LAUNCHED.get(source, "^$"), name)]
    for source, names in _EMULATED.items()
}


def _first_of_each_kernel(instances: list[str]) -> list[str]:
    first: dict[str, str] = {}
    for instance in instances:
        first.setdefault(instance.partition("<")[0], instance)
    return list(first.values())


def _ends(instances: list[str]) -> list[str]:
    """Return the first and the last instantiation of every kernel."""
    return list(dict.fromkeys([*_first_of_each_kernel(instances), *_first_of_each_kernel(instances[::-1])]))


ENDS = {source: _ends(instances) for source, instances in INSTANCES.items()}

# One of every kernel, with the smallest template arguments.
FIRSTS = {source: _first_of_each_kernel(instances) for source, instances in INSTANCES.items()}
