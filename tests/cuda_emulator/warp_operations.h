// The calls in which CUDA threads wait for one another: barriers, shuffles and votes.
//
// The last parameter of each finds out from which line of the kernel it was called; kernels never pass it.
#pragma once

#include <concepts>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <string>
#include <type_traits>

#include "scheduler.h"

inline int penstock_emulated_warp_size = penstock_emulator::warp_size;
inline const int& warpSize = penstock_emulated_warp_size;  // as on a GPU, not a constant expression

namespace penstock_emulator {

// The lanes that a mask names. A mask of 32 bits that are all set, CUDA's customary 0xffffffff, names the whole warp,
// also one of 64 lanes.
struct LaneMask {
    std::uint64_t lanes;
    template <std::integral Mask>
    constexpr LaneMask(Mask mask)
        : lanes(sizeof(Mask) == 4 && static_cast<std::uint32_t>(mask) == 0xffffffffu
                    ? ~std::uint64_t{0}
                    : static_cast<std::uint64_t>(mask)) {}
};
constexpr unsigned whole_warp = 0xffffffffu;

using Ballot = std::conditional_t<warp_size == 32, unsigned, unsigned long long>;

template <class Value>
Value exchange(const Meeting& meeting, Value value, long long source_lane) {
    static_assert(std::is_arithmetic_v<Value> && sizeof(Value) <= 8, "CUDA shuffles numbers of at most 8 bytes");
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    word = scheduler->meet_warp(meeting, word, static_cast<int>(source_lane));
    std::memcpy(&value, &word, sizeof value);
    return value;
}

// The first lane of the calling lane's segment, where `width` cuts the warp into equal segments.
inline int segment_start(const Meeting& meeting, int width) {
    if (width < 1 || width > int{warp_size} || (width & (width - 1)) != 0)
        scheduler->fail(std::string("the width of ") + meeting.operation + " at " + describe(meeting.location) +
                        " is " + std::to_string(width) + ", not a power of two up to the warp size");
    return scheduler->lane() / width * width;
}

inline std::uint64_t vote(const Meeting& meeting, bool predicate) {
    return scheduler->meet_warp(meeting, predicate, every_lane);
}

}  // namespace penstock_emulator

inline void __syncthreads(std::source_location location = std::source_location::current()) {
    penstock_emulator::scheduler->meet_block({"__syncthreads", location});
}

inline void __syncwarp(penstock_emulator::LaneMask mask = penstock_emulator::whole_warp,
                       std::source_location location = std::source_location::current()) {
    penstock_emulator::scheduler->meet_warp({"__syncwarp", location, mask.lanes}, 0, penstock_emulator::every_lane);
}

template <class Value>
Value __shfl_sync(penstock_emulator::LaneMask mask, Value value, int source_lane, int width = warpSize,
                  std::source_location location = std::source_location::current()) {
    const penstock_emulator::Meeting meeting{"__shfl_sync", location, mask.lanes};
    const int start = penstock_emulator::segment_start(meeting, width);
    return penstock_emulator::exchange(meeting, value, start + (source_lane & (width - 1)));
}

// The target may lie in an earlier segment, but not in a later one.
template <class Value>
Value __shfl_xor_sync(penstock_emulator::LaneMask mask, Value value, int lane_mask, int width = warpSize,
                      std::source_location location = std::source_location::current()) {
    const penstock_emulator::Meeting meeting{"__shfl_xor_sync", location, mask.lanes};
    const int stop = penstock_emulator::segment_start(meeting, width) + width;
    const int lane = penstock_emulator::scheduler->lane(), target = lane ^ lane_mask;
    return penstock_emulator::exchange(meeting, value, target >= 0 && target < stop ? target : lane);
}

template <class Value>
Value __shfl_down_sync(penstock_emulator::LaneMask mask, Value value, unsigned delta, int width = warpSize,
                       std::source_location location = std::source_location::current()) {
    const penstock_emulator::Meeting meeting{"__shfl_down_sync", location, mask.lanes};
    const long long stop = penstock_emulator::segment_start(meeting, width) + width;
    const long long lane = penstock_emulator::scheduler->lane(), target = lane + delta;
    return penstock_emulator::exchange(meeting, value, target < stop ? target : lane);
}

template <class Value>
Value __shfl_up_sync(penstock_emulator::LaneMask mask, Value value, unsigned delta, int width = warpSize,
                     std::source_location location = std::source_location::current()) {
    const penstock_emulator::Meeting meeting{"__shfl_up_sync", location, mask.lanes};
    const long long start = penstock_emulator::segment_start(meeting, width);
    const long long lane = penstock_emulator::scheduler->lane(), target = lane - delta;
    return penstock_emulator::exchange(meeting, value, target >= start ? target : lane);
}

inline penstock_emulator::Ballot __ballot_sync(penstock_emulator::LaneMask mask, bool predicate,
                                               std::source_location location = std::source_location::current()) {
    return penstock_emulator::vote({"__ballot_sync", location, mask.lanes}, predicate);
}

inline int __any_sync(penstock_emulator::LaneMask mask, bool predicate,
                      std::source_location location = std::source_location::current()) {
    return penstock_emulator::vote({"__any_sync", location, mask.lanes}, predicate) != 0;
}

inline int __all_sync(penstock_emulator::LaneMask mask, bool predicate,
                      std::source_location location = std::source_location::current()) {
    return penstock_emulator::vote({"__all_sync", location, mask.lanes}, !predicate) == 0;
}
