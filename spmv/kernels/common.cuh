// Macros and functions that all kernels use, so that one source compiles for NVIDIA through NVRTC, for AMD through hiprtc,
// and for a CPU under the emulator of the tests.
//
//   PENSTOCK_SHUFFLE(value, lane, width)     the value held by lane `lane` of the caller's group of `width` lanes
//   PENSTOCK_SHUFFLE_DOWN(value, by, width)  the value held `by` lanes further on in that group
//   PENSTOCK_SHUFFLE_UP(value, by, width)    the value held `by` lanes before
//   PENSTOCK_STREAM_LOAD(pointer)            a load of data that is used once, which need not stay in cache
//   PENSTOCK_PREFETCH(pointer)               fetches data into the cache that is read soon
//   PENSTOCK_SYNC_GROUP()                    waits for the caller's 32 lanes; their writes to shared memory are visible then
//   PENSTOCK_BALLOT(predicate)               one bit for each of the caller's 32 lanes: whether its predicate holds
//   PENSTOCK_LOAD_RELAXED(pointer)           a load that sees what other thread blocks store; orders nothing else
//   PENSTOCK_STORE_RELAXED(pointer, value)   a store that other thread blocks see, whole
//   PENSTOCK_PAUSE()                         a turn of a loop that waits for other lanes ends here
//   PENSTOCK_DYNAMIC_SHARED(type, name)      declares the shared memory whose size a launch gives
//   PENSTOCK_COPY_ASYNC(bytes, target, source)  copies 4, 8 or 16 aligned bytes to shared memory, past the registers
//   PENSTOCK_COPY_COMMIT()                   closes a batch of such copies
//   PENSTOCK_COPY_WAIT(count)                waits until all but the newest `count` batches of this lane have arrived
//
// Groups have 32 lanes at most, so the kernels do not depend on the size of a warp (32, or 64 on some AMD chips). All 32
// lanes of a group must reach a shuffle together; whole groups may leave early.
#if defined(__HIP__)
  #define PENSTOCK_SHUFFLE(value, lane, width) __shfl((value), (lane), (width))
  #define PENSTOCK_SHUFFLE_DOWN(value, by, width) __shfl_down((value), (by), (width))
  #define PENSTOCK_SHUFFLE_UP(value, by, width) __shfl_up((value), (by), (width))
  #define PENSTOCK_STREAM_LOAD(pointer) __builtin_nontemporal_load(pointer)
  #define PENSTOCK_PREFETCH(pointer) __builtin_prefetch(pointer)
  #define PENSTOCK_SYNC_GROUP() (__threadfence_block(), __builtin_amdgcn_wave_barrier())
  #define PENSTOCK_BALLOT(predicate) unsigned(__ballot(predicate) >> (threadIdx.x % warpSize / 32 * 32))
#else
  #if defined(PENSTOCK_CUDA_EMULATOR)  // names the caller's half of an emulated warp of 64
    #define PENSTOCK_GROUP (0xffffffffull << (threadIdx.x % warpSize / 32 * 32))
  #else
    #define PENSTOCK_GROUP 0xffffffffu
  #endif
  #define PENSTOCK_SHUFFLE(value, lane, width) __shfl_sync(PENSTOCK_GROUP, (value), (lane), (width))
  #define PENSTOCK_SHUFFLE_DOWN(value, by, width) __shfl_down_sync(PENSTOCK_GROUP, (value), (by), (width))
  #define PENSTOCK_SHUFFLE_UP(value, by, width) __shfl_up_sync(PENSTOCK_GROUP, (value), (by), (width))
  #define PENSTOCK_STREAM_LOAD(pointer) __ldcs(pointer)
  #define PENSTOCK_SYNC_GROUP() __syncwarp(PENSTOCK_GROUP)
  #if defined(PENSTOCK_CUDA_EMULATOR)
    #define PENSTOCK_BALLOT(predicate) unsigned(__ballot_sync(PENSTOCK_GROUP, (predicate)) >> (threadIdx.x % warpSize / 32 * 32))
    #define PENSTOCK_PAUSE() penstock_emulator::scheduler->pause()
  #else
    #define PENSTOCK_BALLOT(predicate) __ballot_sync(PENSTOCK_GROUP, (predicate))
  #endif
#endif
#if defined(__CUDA_ARCH__)
  #define PENSTOCK_PREFETCH(pointer) asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer))
#elif !defined(PENSTOCK_PREFETCH)
  #define PENSTOCK_PREFETCH(pointer)
#endif
#if !defined(PENSTOCK_PAUSE)
  #define PENSTOCK_PAUSE()
#endif
#if defined(PENSTOCK_CUDA_EMULATOR)
  #define PENSTOCK_DYNAMIC_SHARED(type, name) EMULATED_DYNAMIC_SHARED(type, name)
#else
  #define PENSTOCK_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

#if defined(__HIP__)
template <typename Number>
__device__ __forceinline__ Number load_relaxed(const Number* pointer)
{
    return __hip_atomic_load(pointer, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <typename Number>
__device__ __forceinline__ void store_relaxed(Number* pointer, const Number value)
{
    __hip_atomic_store(pointer, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
#else
  #if defined(__CUDA_ARCH__)
    #define PENSTOCK_RELAXED(type, name, letter)                                                       \
        __device__ __forceinline__ type load_relaxed(const type* pointer)                              \
        {                                                                                              \
            type value;                                                                                \
            asm volatile("ld.relaxed.gpu.global." name " %0, [%1];" : "=" letter(value) : "l"(pointer) : "memory"); \
            return value;                                                                              \
        }                                                                                              \
        __device__ __forceinline__ void store_relaxed(type* pointer, const type value)                 \
        {                                                                                              \
            asm volatile("st.relaxed.gpu.global." name " [%0], %1;" ::"l"(pointer), letter(value) : "memory"); \
        }
  #else
    #define PENSTOCK_RELAXED(type, name, letter)                                                    \
        __device__ __forceinline__ type load_relaxed(const type* pointer) { return *pointer; }      \
        __device__ __forceinline__ void store_relaxed(type* pointer, const type value) { *pointer = value; }
  #endif
PENSTOCK_RELAXED(double, "f64", "d")
PENSTOCK_RELAXED(int, "s32", "r")
#endif
#define PENSTOCK_LOAD_RELAXED(pointer) load_relaxed(pointer)
#define PENSTOCK_STORE_RELAXED(pointer, value) store_relaxed((pointer), (value))

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <int bytes>
__device__ __forceinline__ void copy_async(void* target, const void* source)
{
    const unsigned address = unsigned(__cvta_generic_to_shared(target));
    if constexpr (bytes == 16)  // past the first-level cache, which is left to x
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(source), "n"(bytes));
}
  #define PENSTOCK_COPY_COMMIT() asm volatile("cp.async.commit_group;")
  #define PENSTOCK_COPY_WAIT(count) asm volatile("cp.async.wait_group %0;" ::"n"(count))
#else
template <int bytes>
__device__ __forceinline__ void copy_async(void* target, const void* source)
{
    for (int word = 0; word < bytes / 4; ++word) static_cast<int*>(target)[word] = static_cast<const int*>(source)[word];
}
  #define PENSTOCK_COPY_COMMIT()
  #define PENSTOCK_COPY_WAIT(count)
#endif
#define PENSTOCK_COPY_ASYNC(bytes, target, source) copy_async<bytes>((target), (source))

// Neighbouring numbers, a power of two and 16 bytes at most, that one instruction loads or stores.
template <typename Number, int count>
struct alignas(count * sizeof(Number)) Pack {
    Number number[count];
};

// The power of two whose exponent is that of a float, in 8 bits.
__device__ __forceinline__ double power_of_two(const int exponent) { return double(__int_as_float(exponent << 23)); }

// That of which the values of a block are multiples if they are of 16 bits.
template <typename Value>
__device__ __forceinline__ double scale_of_block(const unsigned char* exponent)
{
    if constexpr (sizeof(Value) > 2) return 1.0;
    else return power_of_two(*exponent);
}

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

// The place from `first` to `stop` of ascending columns that holds a column, or -1.
template <typename Place>
__device__ __forceinline__ Place place_of(const int column, const int* columns, Place first, Place stop)
{
    const Place end = stop;
    while (first < stop) {
        const Place middle = first + (stop - first) / 2;
        if (columns[middle] < column)
            first = middle + 1;
        else
            stop = middle;
    }
    return first < end && columns[first] == column ? first : Place(-1);
}
