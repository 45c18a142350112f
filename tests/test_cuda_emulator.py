"""The CUDA emulator computes what a GPU would, and reports what a GPU would leave undefined."""

import numpy as np
import pytest
from cuda_emulator import EmulatedModule, EmulationError, EmulatorUnavailableError

SOURCE = r"""
#line 1 "reductions.cu"
template <class Value>
__device__ __forceinline__ Value warp_sum(Value value) {
    #pragma unroll
    for (int offset = PENSTOCK_EMULATED_WARP / 2; offset > 0; offset /= 2)
        value += __shfl_down_sync(~0u, value, offset);
    return value;
}

template <class Value>
__global__ void sum_of_each_warp(const Value* __restrict__ values, Value* __restrict__ sums) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    const Value sum = warp_sum(__ldg(values + thread));
    if (threadIdx.x % warpSize == 0) sums[thread / warpSize] = sum;
}

template <class Value, class Sum, int Threads>
__global__ void __launch_bounds__(Threads) sum_of_all(const long long count, const Value* values, Sum* total) {
    __shared__ Sum partial[Threads];
    Sum sum = 0;
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) sum += values[i];
    partial[threadIdx.x] = sum;
    for (int half = Threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    if (threadIdx.x == 0) atomicAdd(total, partial[0]);
}

#line 1 "features.cu"
__constant__ double weights[2] = {0.5, 0.25};

extern "C" __global__ void shuffles(int* out, const int width) {
    const int lane = threadIdx.x;
    out[lane] = __shfl_sync(~0u, lane, 5, width);
    out[blockDim.x + lane] = __shfl_up_sync(~0u, lane, 3, width);
    out[2 * blockDim.x + lane] = __shfl_down_sync(~0u, lane, 3, width);
    out[3 * blockDim.x + lane] = __shfl_xor_sync(~0u, lane, 9, width);
}

extern "C" __global__ void votes(unsigned long long* out) {
    const int lane = threadIdx.x;
    out[0] = __ballot_sync(~0u, lane % 3 == 0);
    out[1] = __any_sync(~0u, lane == 7) + 2 * __any_sync(~0u, lane < 0);
    out[2] = __all_sync(~0u, lane >= 0) + 2 * __all_sync(~0u, lane != 7);
    out[3] = __popcll(out[0]) + 100 * __ffsll(8) + 10000 * __clz(1) + 1000000 * __popc(7u) + 10000000 * __ffs(0);
}

extern "C" __global__ void shared_bytes(unsigned char* bytes, unsigned char* dynamic_bytes, const int write) {
    __shared__ unsigned char tile[40];
    EMULATED_DYNAMIC_SHARED(unsigned char, dynamic_tile);
    bytes[blockIdx.x * 40 + threadIdx.x] = tile[threadIdx.x];
    dynamic_bytes[blockIdx.x * 40 + threadIdx.x] = dynamic_tile[threadIdx.x];
    tile[threadIdx.x] = dynamic_tile[threadIdx.x + write] = 1;
}

template <class Value, int Count>
__global__ void shared_values(Value* out) {
    __shared__ Value tile[Count];
    out[blockIdx.x * Count + threadIdx.x] = tile[threadIdx.x];
    tile[threadIdx.x] = 1;
}

extern "C" __global__ void add_pairs(const double2* pairs, double* sums, const int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const double2 pair = pairs[i];
    sums[i] = fma(pair.x, weights[0], pair.y * weights[1]) + max(0.0, -1.0f) + min(0u, 3) + rsqrt(4.0f) - rsqrt(4.0);
}

extern "C" __global__ void geometry(unsigned* out) {
    const dim3 shape = blockDim;
    unsigned thread = threadIdx.x + shape.x * (threadIdx.y + shape.y * threadIdx.z);
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[block * shape.x * shape.y * shape.z + thread] = 100 * block + thread;
}

extern "C" __global__ void atomics(int* out) {
    const int lane = threadIdx.x;
    atomicAdd(&out[0], 1);
    atomicMax(&out[1], lane);
    atomicMin(&out[2], -lane);
    atomicCAS(&out[3], 0, 5);
    atomicExch(&out[4], 6);
}

extern "C" __global__ void last_thread_wins(int* winner) { *winner = threadIdx.x; }

extern "C" __global__ void shift_in_place(int* values) {
    const int mine = values[(threadIdx.x + 1) % blockDim.x];
    __syncthreads();
    values[threadIdx.x] = mine;
}

#line 1 "mistakes.cu"
extern "C" __global__ void divergent_shuffle(int* out) {
    if (threadIdx.x % 2 == 0)
        out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 2);
    __syncwarp();
}

extern "C" __global__ void divergent_barrier(int* out) {
    if (threadIdx.x < 40)
        __syncthreads();
    else
        __syncthreads();
}

extern "C" __global__ void exit_before_shuffle(int* out, const int count) {
    if (threadIdx.x >= count) return;
    out[threadIdx.x] = __shfl_down_sync(0xffffffffu, int(threadIdx.x), 1);
}

extern "C" __global__ void exit_before_barrier(int* out) {
    if (threadIdx.x == 3) return;
    __syncthreads();
}

extern "C" __global__ void foreign_mask(int* out) { __syncwarp(0x1u); }

extern "C" __global__ void shuffle_from_absent_lane(double* out) {
    if (threadIdx.x < 4) out[threadIdx.x] = __shfl_sync(0xfu, 1.0, 2 * threadIdx.x);
}

extern "C" __global__ void write_at(double* first, double* second, const int index) { second[index] = 1.0; }

extern "C" __global__ void outside_of_tile(int* out, const int index) {
    __shared__ int tile[32];
    tile[index] = 1;
}

extern "C" __global__ void read_without_barrier(int* out) {
    __shared__ int tile[64];
    tile[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = tile[63 - threadIdx.x];
}
"""

NAMES = [
    "sum_of_each_warp<double>",
    "sum_of_each_warp<int>",
    "sum_of_all<float, double, 128>",
    "shared_values<double, 8>",
    "shared_values<int, 16>",
    *("shuffles", "votes", "shared_bytes", "add_pairs", "geometry", "atomics", "last_thread_wins", "shift_in_place"),
    *("divergent_shuffle", "divergent_barrier", "exit_before_shuffle", "exit_before_barrier", "foreign_mask"),
    *("shuffle_from_absent_lane", "write_at", "outside_of_tile", "read_without_barrier"),
]


def compiled(source: str, names: list[str], *, warp_size: int = 32, sanitize: bool = True) -> EmulatedModule:
    try:
        return EmulatedModule(source, names, warp_size=warp_size, sanitize=sanitize)
    except EmulatorUnavailableError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module", params=[32, 64])
def warp_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def module(warp_size: int) -> EmulatedModule:
    return compiled(SOURCE, NAMES, warp_size=warp_size)


@pytest.fixture(scope="module")
def module32() -> EmulatedModule:
    return compiled(SOURCE, NAMES)


# -------------------------------------------------------------------------------- what a GPU computes


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "dtype"), [("double", "f8"), ("int", "i4")])
def test_warp_reduction(module: EmulatedModule, warp_size: int, name: str, dtype: str, seed: int) -> None:
    values = np.random.default_rng(3).integers(-50, 50, 3 * 128).astype(dtype)
    sums = np.zeros(values.size // warp_size, dtype)
    module.get_function(f"sum_of_each_warp<{name}>")((3,), (128,), (values, sums), seed=seed)
    np.testing.assert_array_equal(sums, values.reshape(-1, warp_size).sum(axis=1))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_block_reduction_with_commas_in_its_name(module: EmulatedModule, seed: int) -> None:
    values = np.random.default_rng(4).integers(-50, 50, 1000).astype(np.float32)
    total = np.zeros(1)
    function = module.get_function("sum_of_all<float, double, 128>")
    function((3,), (128,), (np.int64(values.size), values, total), shared_mem=0, seed=seed)
    assert total[0] == values.sum(dtype=np.float64)


@pytest.mark.parametrize("width", [8, 16, 32])
def test_shuffles_within_segments(module: EmulatedModule, warp_size: int, width: int) -> None:
    lanes = np.arange(warp_size)
    start = lanes // width * width
    out = np.zeros((4, warp_size), np.int32)
    module.get_function("shuffles")((1,), (warp_size,), (out, np.int32(width)))
    np.testing.assert_array_equal(out[0], start + 5)
    np.testing.assert_array_equal(out[1], np.where(lanes - 3 >= start, lanes - 3, lanes))
    np.testing.assert_array_equal(out[2], np.where(lanes + 3 < start + width, lanes + 3, lanes))
    np.testing.assert_array_equal(out[3], np.where(lanes ^ 9 < start + width, lanes ^ 9, lanes))


def test_votes_and_bit_functions(module: EmulatedModule, warp_size: int) -> None:
    out = np.zeros(4, np.uint64)
    module.get_function("votes")((1,), (warp_size,), (out,))
    every_third = sum(1 << lane for lane in range(0, warp_size, 3))
    assert out.tolist() == [every_third, 1, 1, every_third.bit_count() + 400 + 310000 + 3000000]


def test_atomics(module: EmulatedModule) -> None:
    out = np.zeros(5, np.int32)
    module.get_function("atomics")((2,), (96,), (out,), seed=5)
    assert out.tolist() == [192, 95, -95, 5, 6]


def test_grid_and_block_of_three_dimensions(module: EmulatedModule) -> None:
    out = np.zeros((12, 30), np.uint32)
    module.get_function("geometry")((2, 3, 2), (5, 3, 2), (out,), seed=9)
    np.testing.assert_array_equal(out, 100 * np.arange(12)[:, None] + np.arange(30))


def test_vector_loads(module32: EmulatedModule) -> None:
    pairs = np.arange(22.0)
    sums = np.zeros(11)
    module32.get_function("add_pairs")((1,), (32,), (pairs, sums, np.int32(11)))
    np.testing.assert_array_equal(sums, pairs[0::2] * 0.5 + pairs[1::2] * 0.25)


def test_overlapping_arguments_stay_one_memory(module32: EmulatedModule) -> None:
    values = np.arange(40.0)
    module32.get_function("write_at")((1,), (1,), (values[:30], values[10:], np.int32(5)))
    assert values[15] == 1.0
    assert np.count_nonzero(values != np.arange(40.0)) == 1


# -------------------------------------------------------------------------------------- shared memory


def test_shared_memory_starts_poisoned_in_every_block(module: EmulatedModule) -> None:
    static_bytes, dynamic_bytes = np.zeros((2, 3, 40), np.uint8)
    module.get_function("shared_bytes")((3,), (40,), (static_bytes, dynamic_bytes, np.int32(0)), shared_mem=40)
    assert (static_bytes == 0xCD).all()
    assert (dynamic_bytes == 0xCD).all()


def test_shared_memory_of_templates_starts_poisoned(module: EmulatedModule) -> None:
    doubles, integers = np.zeros((2, 8)), np.zeros((2, 16), np.int32)
    module.get_function("shared_values<double, 8>")((2,), (8,), (doubles,))
    module.get_function("shared_values<int, 16>")((2,), (16,), (integers,))
    assert (doubles.view(np.uint8) == 0xCD).all()
    assert (integers.view(np.uint8) == 0xCD).all()


def test_modules_do_not_share_shared_memory() -> None:
    source = """template <class Value> __global__ void fill(int* out) {
        __shared__ int tile[SIZE];
        for (int i = 0; i < SIZE; ++i) tile[i] = i;
        for (int i = 0; i < SIZE; ++i) out[i] = tile[i];
    }"""
    for size in (4, 4000):
        out = np.zeros(size, np.int32)
        module = compiled(f"#define SIZE {size}\n{source}", ["fill<int>"])
        module.get_function("fill<int>")((1,), (1,), (out,))
        np.testing.assert_array_equal(out, np.arange(size))


def test_write_behind_dynamic_shared_memory_is_reported(module32: EmulatedModule) -> None:
    static_bytes, dynamic_bytes = np.zeros((2, 1, 40), np.uint8)
    with pytest.raises(EmulationError, match=r"block \(0, 0, 0\) wrote outside its dynamic shared memory"):
        module32.get_function("shared_bytes")((1,), (40,), (static_bytes, dynamic_bytes, np.int32(1)), shared_mem=40)


def test_too_much_dynamic_shared_memory_is_refused() -> None:
    function = compiled(SOURCE, NAMES).get_function("shared_bytes")
    arguments = (np.zeros(40, np.uint8), np.zeros(40, np.uint8), np.int32(0))
    with pytest.raises(ValueError, match="max_dynamic_shared_size_bytes"):
        function((1,), (40,), arguments, shared_mem=60000)
    function.max_dynamic_shared_size_bytes = 60000
    function((1,), (40,), arguments, shared_mem=60000)


# --------------------------------------------------------------------------------- order of the lanes


def test_seed_changes_the_order_but_not_a_correct_result(module32: EmulatedModule) -> None:
    winners, results = set(), set()
    for seed in range(8):
        winner, values = np.zeros(1, np.int32), np.arange(64, dtype=np.int32)
        module32.get_function("last_thread_wins")((1,), (64,), (winner,), seed=seed)
        module32.get_function("shift_in_place")((1,), (64,), (values,), seed=seed)
        winners.add(int(winner[0]))
        results.add(values.tobytes())
        if seed == 0:
            assert winners == {63}
    assert len(winners) > 3
    assert results == {np.roll(np.arange(64, dtype=np.int32), -1).tobytes()}


def test_seed_reveals_a_missing_barrier(module32: EmulatedModule) -> None:
    results = []
    for seed in (1, 1, 2):
        out = np.zeros(64, np.int32)
        module32.get_function("read_without_barrier")((1,), (64,), (out,), seed=seed)
        results.append(out.tobytes())
    assert results[0] == results[1]
    assert results[0] != results[2]


# ----------------------------------------------------------------------------- mistakes of the kernel


def run_mistake(module: EmulatedModule, name: str, threads: int, *values: np.generic) -> str:
    out = np.zeros(256, np.int32)
    with pytest.raises(EmulationError) as caught:
        module.get_function(name)((1,), (threads,), (out, *values))
    assert not out.any(), "a launch that fails leaves the arrays alone"
    return str(caught.value)


def test_divergent_shuffle_is_reported(module: EmulatedModule) -> None:
    message = run_mistake(module, "divergent_shuffle", 16)
    assert message.startswith(
        "divergent_shuffle: block (0, 0, 0) cannot go on: "
        "threads 0, 2, 4, 6, 8, 10, 12, 14 wait in __shfl_xor_sync at mistakes.cu:3 for lanes 0xffff; "
        "threads 1, 3, 5, 7, 9, 11, 13, 15 wait in __syncwarp at mistakes.cu:4 for lanes 0xffff."
    )


def test_divergent_barrier_is_reported(module: EmulatedModule) -> None:
    message = run_mistake(module, "divergent_barrier", 128)
    assert "threads 0-39 wait in __syncthreads at mistakes.cu:9; threads 40-127 wait in __syncthreads at" in message


def test_early_exit_before_a_shuffle_is_reported(module: EmulatedModule) -> None:
    message = run_mistake(module, "exit_before_shuffle", 32, np.int32(31))
    assert (
        "threads 0-30 wait in __shfl_down_sync at mistakes.cu:16 for lanes 0xffffffff; thread 31 has exited" in message
    )


def test_early_exit_before_a_barrier_is_reported(module: EmulatedModule) -> None:
    message = run_mistake(module, "exit_before_barrier", 64)
    assert "threads 0-2, 4-63 wait in __syncthreads at mistakes.cu:21; thread 3 has exited" in message


def test_mask_without_the_calling_lane_is_reported(module: EmulatedModule) -> None:
    message = run_mistake(module, "foreign_mask", 32)
    assert "thread 1: the mask of __syncwarp at mistakes.cu:24 does not name the lane that calls it" in message


def test_width_that_is_no_power_of_two_is_reported(module: EmulatedModule) -> None:
    assert "the width of __shfl_sync at features.cu:5 is 24" in run_mistake(module, "shuffles", 32, np.int32(24))


def test_shuffle_from_an_absent_lane_returns_poison(module32: EmulatedModule) -> None:
    out = np.zeros(4)
    module32.get_function("shuffle_from_absent_lane")((1,), (32,), (out,))
    assert out[:2].tolist() == [1.0, 1.0]
    assert (out[2:].view(np.uint8) == 0xCD).all()


@pytest.mark.parametrize(
    ("index", "what"), [(10, "0 bytes behind its end"), (-1, "1 bytes before its start"), (17, "56 bytes behind")]
)
def test_write_outside_an_array_is_reported(module32: EmulatedModule, index: int, what: str) -> None:
    first, second = np.zeros(5), np.zeros(10)
    with pytest.raises(EmulationError, match=rf"argument 1 of write_at, an array of float64 .* written {what}"):
        module32.get_function("write_at")((1,), (1,), (first, second, np.int32(index)))


def test_write_to_a_read_only_array_is_reported(module32: EmulatedModule) -> None:
    constant = np.zeros(4)
    constant.flags.writeable = False
    with pytest.raises(EmulationError, match=r"argument 1 of write_at.* is read-only"):
        module32.get_function("write_at")((1,), (1,), (None, constant, np.int32(2)))


def test_index_outside_shared_memory_is_reported(module32: EmulatedModule) -> None:
    message = run_mistake(module32, "outside_of_tile", 1, np.int32(40))
    assert "thread 0: index 40 is outside an array of type 'int [32]' at mistakes.cu:" in message


def test_misaligned_vector_load_is_reported(module32: EmulatedModule) -> None:
    values, sums = np.zeros(9), np.zeros(4)
    with pytest.raises(EmulationError, match=r"misaligned access .*double2.* features.cu:\d+: .* multiple of 16 bytes"):
        module32.get_function("add_pairs")((1,), (4,), (values[1:], sums, np.int32(4)))


def test_null_pointer_is_reported(module32: EmulatedModule) -> None:
    with pytest.raises(EmulationError, match=r"access through a null pointer .* at mistakes.cu:\d+"):
        module32.get_function("write_at")((1,), (1,), (None, None, np.int32(0)))


# ----------------------------------------------------------------------------- mistakes of the caller


def test_compile_error_shows_the_line_of_the_source() -> None:
    with pytest.raises(EmulationError, match=r"wrong.cu:7:\d+: error: .*missing_name"):
        compiled('#line 7 "wrong.cu"\n__global__ void wrong(int* out) { *out = missing_name; }', ["wrong"])


def test_name_expression_without_kernel_does_not_compile() -> None:
    with pytest.raises(EmulationError, match=r"name expressions:\d+:\d+: error: .*absent"):
        compiled("", ["absent<double, 4>"])


def test_unknown_function(module32: EmulatedModule) -> None:
    with pytest.raises(EmulationError, match="no kernel 'absent' in this module"):
        module32.get_function("absent")


def test_strided_array_is_refused(module32: EmulatedModule) -> None:
    with pytest.raises(ValueError, match="argument 1 of write_at: expected a C-contiguous array"):
        module32.get_function("write_at")((1,), (1,), (np.zeros(4), np.zeros(8)[::2], np.int32(0)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "argument 2 of write_at: a Python int"),
        (3.0, "argument 2 of write_at: a Python float"),
        (np.int64(3), "argument 2 of write_at: expected an integer of 4 bytes, got a scalar of int64"),
        (np.float32(3), "got a scalar of float32"),
        (np.zeros(1, np.int32), "got an array of int32"),
        ("3", "got str"),
    ],
)
def test_wrong_scalar_is_refused(module32: EmulatedModule, value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        module32.get_function("write_at")((1,), (1,), (np.zeros(4), np.zeros(4), value))


def test_wrong_array_type_and_count_are_refused(module32: EmulatedModule) -> None:
    function = module32.get_function("write_at")
    with pytest.raises(TypeError, match="a pointer to a floating-point number of 8 bytes, got an array of float32"):
        function((1,), (1,), (np.zeros(4), np.zeros(4, np.float32), np.int32(0)))
    with pytest.raises(TypeError, match="takes 3 arguments, got 2"):
        function((1,), (1,), (np.zeros(4), np.zeros(4)))


@pytest.mark.parametrize(("grid", "block"), [((0,), (32,)), ((1, 1, 1, 1), (32,)), ((1,), (64, 32)), ((), (1,))])
def test_impossible_launch_is_refused(module32: EmulatedModule, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"grid must|block (must|has)"):
        module32.get_function("last_thread_wins")(grid, block, (np.zeros(1, np.int32),))


def test_warp_size_is_checked() -> None:
    with pytest.raises(ValueError, match="warp_size must be 32 or 64"):
        EmulatedModule("", [], warp_size=16)


def test_other_machines_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(EmulatorUnavailableError, match="Linux on x86-64"):
        EmulatedModule("", [])


def test_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmulatorUnavailableError, match=r"g\+\+|Linux"):
        EmulatedModule("", [])
