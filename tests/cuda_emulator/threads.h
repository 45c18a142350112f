// The threads of a block, the calls in which they wait for one another, and a description of both in words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <source_location>
#include <span>
#include <string>
#include <vector>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace penstock_emulator {

// A call in which threads wait for one another. They meet only in the same call of the source, with the same mask.
struct Meeting {
    const char* operation = "";
    std::source_location location;
    std::uint64_t lanes = 0;  // the lanes of the warp that take part; 0 in a barrier of the whole block

    bool operator==(const Meeting& other) const {
        return lanes == other.lanes && location.line() == other.location.line() &&
               location.column() == other.location.column() && std::strcmp(operation, other.operation) == 0 &&
               std::strcmp(location.file_name(), other.location.file_name()) == 0;
    }
};

enum class State { ready, waiting_for_warp, waiting_for_block, exited };

struct Thread {
    uint3 index;
    State state = State::ready;
    void* stack_pointer = nullptr;
    Meeting meeting;             // what a waiting thread waits in
    std::uint64_t offered = 0;   // the value that it brings to a shuffle or vote
    int source_lane = 0;         // the lane whose value it wants, or `every_lane`
    std::uint64_t received = 0;  // what it takes home
};
constexpr int every_lane = -1;  // asks for one bit of every lane: whether that lane offered something other than zero

inline std::string describe(const uint3& index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

inline std::string describe(const std::source_location& location) {
    return std::string(location.file_name()) + ":" + std::to_string(location.line());
}

// Such as "0-15, 20, 24-31" for increasing numbers; a long list is cut short.
inline std::string describe(const std::vector<std::size_t>& numbers) {
    constexpr int most_runs = 8;
    std::string text;
    int runs = 0;
    for (std::size_t start = 0, stop; start < numbers.size(); start = stop) {
        for (stop = start + 1; stop < numbers.size() && numbers[stop] == numbers[stop - 1] + 1;) ++stop;
        if (++runs > most_runs) return text + " and " + std::to_string(numbers.size() - start) + " more";
        text += (runs > 1 ? ", " : "") + std::to_string(numbers[start]);
        if (stop > start + 1) text += "-" + std::to_string(numbers[stop - 1]);
    }
    return text;
}

// Such as "threads 0-15 wait in __syncwarp at reduce.cu:12 for lanes 0xffffffff; threads 16-31 have exited". Threads
// are numbered within their block, x fastest.
inline std::string describe(std::span<const Thread> threads) {
    constexpr int most_groups = 8;
    std::string text;
    std::vector<bool> told(threads.size(), false);
    int groups = 0;
    for (std::size_t first = 0; first < threads.size(); ++first) {
        if (told[first]) continue;
        if (++groups > most_groups) return text + "; other threads wait elsewhere";
        const Thread& example = threads[first];
        std::vector<std::size_t> alike;
        for (std::size_t number = first; number < threads.size(); ++number) {
            if (threads[number].state != example.state) continue;
            if (example.state != State::exited && !(threads[number].meeting == example.meeting)) continue;
            alike.push_back(number);
            told[number] = true;
        }
        const bool one = alike.size() == 1;
        text += (groups > 1 ? "; " : "") + std::string(one ? "thread " : "threads ") + describe(alike);
        if (example.state == State::exited) {
            text += one ? " has exited" : " have exited";
            continue;
        }
        const Meeting& meeting = example.meeting;
        text +=
            (one ? " waits in " : " wait in ") + std::string(meeting.operation) + " at " + describe(meeting.location);
        if (example.state == State::waiting_for_warp) {
            char lanes[32];
            std::snprintf(lanes, sizeof lanes, "0x%llx", static_cast<unsigned long long>(meeting.lanes));
            text += std::string(" for lanes ") + lanes;
        }
    }
    return text;
}

}  // namespace penstock_emulator
