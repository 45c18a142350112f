// The small vocabulary in which all kernels are written, so that one source compiles for NVIDIA through NVRTC, for AMD
// through hiprtc, and for a CPU under the emulator of the tests.
//
//   PENSTOCK_SHUFFLE(value, lane, width)     the value held by lane `lane` of the caller's group of `width` lanes
//   PENSTOCK_SHUFFLE_DOWN(value, by, width)  the value held `by` lanes further on in that group
//   PENSTOCK_STREAM_LOAD(pointer)            a load of data that is used once, which need not stay in cache
//
// Groups have 32 lanes at most, so the kernels do not depend on the size of a warp (32, or 64 on some AMD chips). All
// lanes of a warp must reach a shuffle together, so kernels never return early before one.
#if defined(__HIP_PLATFORM_AMD__)
  #define PENSTOCK_SHUFFLE(value, lane, width) __shfl((value), (lane), (width))
  #define PENSTOCK_SHUFFLE_DOWN(value, by, width) __shfl_down((value), (by), (width))
  #define PENSTOCK_STREAM_LOAD(pointer) __builtin_nontemporal_load(pointer)
#else
  #define PENSTOCK_SHUFFLE(value, lane, width) __shfl_sync(0xffffffffu, (value), (lane), (width))
  #define PENSTOCK_SHUFFLE_DOWN(value, by, width) __shfl_down_sync(0xffffffffu, (value), (by), (width))
  #define PENSTOCK_STREAM_LOAD(pointer) __ldcs(pointer)
#endif

// out = alpha * total + beta * out, never reading out when beta is zero: it may hold NaN.
template <typename Vector>
__device__ __forceinline__ void store_product(Vector* out, double total, double alpha, double beta)
{
    *out = beta == 0.0 ? Vector(alpha * total) : Vector(alpha * total + beta * double(*out));
}

// The sum over a group of `width` neighbouring lanes, width a power of two; only its first lane holds it afterwards.
template <int width>
__device__ __forceinline__ double sum_over_lanes(double value)
{
#pragma unroll
    for (int by = width / 2; by > 0; by /= 2) value += PENSTOCK_SHUFFLE_DOWN(value, by, width);
    return value;
}
