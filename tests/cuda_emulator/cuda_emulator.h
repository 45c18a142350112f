// Runs the source of a CUDA C++ kernel, unchanged, on one core of a CPU: this header declares what a kernel expects
// from the CUDA compiler, and the kernel is then compiled as ordinary C++.
//
// The idea. Every CUDA thread is a fiber: a call of the kernel on a stack of its own (fibers.h). The scheduler
// (scheduler.h) lets one thread run, without interruption, until it comes to a call at which CUDA threads wait for one
// another (a shuffle, a vote, __syncwarp, __syncthreads) or returns from the kernel. There the thread notes what it
// waits for and the next one has its turn. When nobody can run, the scheduler looks for complete meetings: all lanes
// that a mask names wait in the same call, or all threads of the block wait in the same barrier. It hands the values of
// the shuffle or vote from lane to lane and lets these threads go on. If threads wait but no meeting is complete, they
// would wait for ever. On a GPU that is undefined or a hang; here the launch ends with a message that says who waits
// where.
//
// What follows from it:
//   - Threads never run at the same time, so an atomic operation is a plain operation.
//   - The order of threads and blocks is natural for seed 0 and random for any other, so a missing barrier shows as a
//     result that depends on the seed.
//   - Shared memory is poisoned before every block, and a shuffle from a lane that takes no part returns poison.
//   - A loop in which a thread polls memory until another thread has written it ends only if every turn of it calls
//     penstock_emulator::scheduler->pause(). Thread blocks run one after another: a thread cannot wait for a later block.
//   - Memory ordering is not emulated, and a * b + c is not contracted to a fused multiply-add: last digits may differ.
#pragma once

// For kernels, which need not include anything themselves.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <bit>
#include <cmath>
#include <concepts>
#include <type_traits>

#include "launch.h"
#include "memory_checks.h"
#include "scheduler.h"
#include "shared_memory.h"
#include "warp_operations.h"

#define PENSTOCK_CUDA_EMULATOR 1

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// Stands for `extern __shared__ type name[];`. (`__shared__` itself is in shared_memory.h.)
#define EMULATED_DYNAMIC_SHARED(type, name) \
    type* const name = static_cast<type*>(penstock_emulator::scheduler->shared_memory.dynamic())

inline const uint3& threadIdx = penstock_emulator::position.thread;
inline const uint3& blockIdx = penstock_emulator::position.block;
inline const dim3& blockDim = penstock_emulator::position.block_shape;
inline const dim3& gridDim = penstock_emulator::position.grid_shape;

// -------------------------------------------------------------------------------------------- vectors

// clang-format off
struct __align__(8)  int2    { int x, y; };
struct __align__(16) int4    { int x, y, z, w; };
struct __align__(8)  float2  { float x, y; };
struct __align__(16) float4  { float x, y, z, w; };
struct __align__(16) double2 { double x, y; };
struct __align__(16) double4 { double x, y, z, w; };
// clang-format on

inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline double4 make_double4(double x, double y, double z, double w) { return {x, y, z, w}; }

// --------------------------------------------------------------------------------------------- memory

// Threads never run at the same time: fences have nothing to do, and atomic operations are plain ones. Each takes the
// types for which CUDA has it, and no others, so that a kernel accepted here also compiles for a GPU.
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace penstock_emulator {
template <class Type, class... Allowed>
concept OneOf = (std::same_as<Type, Allowed> || ...);
}  // namespace penstock_emulator

template <penstock_emulator::OneOf<int, unsigned, unsigned long long, float, double> Value>
Value atomicAdd(Value* address, std::type_identity_t<Value> value) {
    const Value old = *address;
    *address = old + value;
    return old;
}

template <penstock_emulator::OneOf<int, unsigned, long long, unsigned long long> Value>
Value atomicMax(Value* address, std::type_identity_t<Value> value) {
    const Value old = *address;
    *address = old < value ? value : old;
    return old;
}

template <penstock_emulator::OneOf<int, unsigned, long long, unsigned long long> Value>
Value atomicMin(Value* address, std::type_identity_t<Value> value) {
    const Value old = *address;
    *address = value < old ? value : old;
    return old;
}

template <penstock_emulator::OneOf<int, unsigned, unsigned long long> Value>
Value atomicOr(Value* address, std::type_identity_t<Value> value) {
    const Value old = *address;
    *address = old | value;
    return old;
}

template <penstock_emulator::OneOf<int, unsigned, unsigned short, unsigned long long> Value>
Value atomicCAS(Value* address, std::type_identity_t<Value> expected, std::type_identity_t<Value> value) {
    const Value old = *address;
    if (old == expected) *address = value;
    return old;
}

template <penstock_emulator::OneOf<int, unsigned, unsigned long long, float> Value>
Value atomicExch(Value* address, std::type_identity_t<Value> value) {
    const Value old = *address;
    *address = value;
    return old;
}

// Loads and stores with a hint for the cache.
template <class Value>
Value __ldg(const Value* address) {
    return *address;
}
template <class Value>
Value __ldcs(const Value* address) {
    return *address;
}
template <class Value>
Value __ldcg(const Value* address) {
    return *address;
}
template <class Value>
void __stcs(Value* address, std::type_identity_t<Value> value) {
    *address = value;
}

// -------------------------------------------------------------------------------------------- numbers

inline float __int_as_float(int word) { return std::bit_cast<float>(word); }
inline long long __double_as_longlong(double number) { return std::bit_cast<long long>(number); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline int __popc(unsigned word) { return std::popcount(word); }
inline int __popcll(unsigned long long word) { return std::popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline int __ffsll(long long word) { return __builtin_ffsll(word); }
inline int __clz(int word) { return std::countl_zero(static_cast<unsigned>(word)); }

// A template, because the newest C libraries declare a function of this name for double, which is then preferred.
template <std::floating_point Number>
Number rsqrt(Number number) {
    return Number(1) / std::sqrt(number);
}

// fma, fabs, sqrt and their like come from <math.h>. Of mixed types min and max return the common type of C++, as CUDA
// does for int with unsigned and for float with double; of a number and a NaN they return the number.
template <class First, class Second>
    requires std::is_arithmetic_v<First> && std::is_arithmetic_v<Second>
constexpr std::common_type_t<First, Second> min(First first, Second second) {
    using Common = std::common_type_t<First, Second>;
    if constexpr (std::is_floating_point_v<Common>) return fmin(Common(first), Common(second));
    return Common(second) < Common(first) ? Common(second) : Common(first);
}

template <class First, class Second>
    requires std::is_arithmetic_v<First> && std::is_arithmetic_v<Second>
constexpr std::common_type_t<First, Second> max(First first, Second second) {
    using Common = std::common_type_t<First, Second>;
    if constexpr (std::is_floating_point_v<Common>) return fmax(Common(first), Common(second));
    return Common(first) < Common(second) ? Common(second) : Common(first);
}
