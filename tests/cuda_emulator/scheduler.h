// The scheduler: lets the threads of a block take turns, and lets them meet where CUDA threads meet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"
#include "shared_memory.h"
#include "threads.h"

namespace penstock_emulator {

constexpr unsigned warp_size = PENSTOCK_EMULATED_WARP;

// Where the running thread is. The CUDA variables threadIdx, blockIdx, blockDim and gridDim refer to these members.
struct Position {
    uint3 thread, block;
    dim3 block_shape, grid_shape;
};
inline Position position;

// The order in which the ready threads, or the blocks, have their turn: natural for seed 0, else drawn every round.
class Turns {
public:
    Turns(std::size_t count, std::uint64_t seed) : order(count), natural(seed == 0), state(seed) {
        for (std::size_t index = 0; index < count; ++index) order[index] = index;
    }
    const std::vector<std::size_t>& next_round() {
        if (!natural)
            for (std::size_t remaining = order.size(); remaining > 1; --remaining)
                std::swap(order[remaining - 1], order[draw() % remaining]);
        return order;
    }

private:
    std::uint64_t draw() {  // SplitMix64 (Steele, Lea and Flood, 2014)
        std::uint64_t mixed = state += 0x9e3779b97f4a7c15u;
        mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
        mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
        return mixed ^ mixed >> 31;
    }
    std::vector<std::size_t> order;
    bool natural;
    std::uint64_t state;
};

// A kernel together with its arguments.
struct BoundKernel {
    virtual void run() const = 0;
};

class Scheduler {
public:
    Scheduler(dim3 grid, dim3 block, std::uint64_t seed, const BoundKernel& kernel, SharedMemory& shared_memory,
              Stacks stacks)
        : shared_memory(shared_memory),
          kernel(kernel),
          threads(std::size_t{block.x} * block.y * block.z),
          stacks(stacks),
          thread_turns(threads.size(), seed),
          block_turns(std::size_t{grid.x} * grid.y * grid.z, seed) {
        position.grid_shape = grid;
        position.block_shape = block;
        for (unsigned number = 0; number < threads.size(); ++number)
            threads[number].index = {number % block.x, number / block.x % block.y, number / block.x / block.y};
    }

    // Plays all blocks. Returns what went wrong, or an empty string.
    std::string play_grid();

    // For the thread that is running:
    int lane() const { return static_cast<int>(thread_number() % warp_size); }
    std::uint64_t meet_warp(Meeting meeting, std::uint64_t offered, int source_lane);
    void meet_block(const Meeting& meeting) { wait(State::waiting_for_block, meeting); }
    // A thread that polls memory lets the others have their turn; it stays ready.
    void pause() { suspend(); }
    [[noreturn]] void fail(const std::string& reason);
    SharedMemory& shared_memory;

private:
    void play_block();
    void resume(Thread& thread);
    void suspend() { penstock_emulator_switch_stack(&running->stack_pointer, own_stack_pointer); }
    void wait(State state, const Meeting& meeting);
    static void first_function_of_a_fiber();
    std::size_t thread_number() const { return running - threads.data(); }
    std::span<Thread> warp_of(std::size_t thread);
    bool release_complete_warp_meetings();
    bool release_complete_block_meeting();

    const BoundKernel& kernel;
    std::vector<Thread> threads;
    Stacks stacks;
    Turns thread_turns, block_turns;
    Thread* running = nullptr;
    void* own_stack_pointer = nullptr;
    std::string failure;
};
inline Scheduler* scheduler = nullptr;  // plays the present launch

inline std::string Scheduler::play_grid() {
    const dim3 grid = position.grid_shape;
    scheduler = this;
    for (std::size_t number : block_turns.next_round()) {
        const std::size_t row = number / grid.x;
        position.block = {unsigned(number % grid.x), unsigned(row % grid.y), unsigned(row / grid.y)};
        play_block();
        if (!failure.empty()) break;
    }
    scheduler = nullptr;
    return failure.empty() ? failure : "block " + describe(position.block) + failure;
}

inline void Scheduler::play_block() {
    shared_memory.poison();
    for (std::size_t number = 0; number < threads.size(); ++number) {
        threads[number].state = State::ready;
        threads[number].stack_pointer = stacks.prepare(number, first_function_of_a_fiber);
    }
    bool somebody_is_ready = true;
    while (somebody_is_ready) {
        for (std::size_t number : thread_turns.next_round()) {
            if (threads[number].state == State::ready) resume(threads[number]);
            if (!failure.empty()) return;
        }
        somebody_is_ready = release_complete_warp_meetings() || release_complete_block_meeting() ||
                            std::ranges::any_of(threads, [](const Thread& t) { return t.state == State::ready; });
    }
    if (!std::ranges::all_of(threads, [](const Thread& thread) { return thread.state == State::exited; }))
        failure =
            " cannot go on: " + describe(threads) +
            ". All lanes that a mask names must reach the same call, and all threads of a block the same barrier, "
            "before any of them exits; on a GPU this launch is undefined or hangs";
    else if (shared_memory.overrun())
        failure = " wrote outside its dynamic shared memory";
}

inline void Scheduler::resume(Thread& thread) {
    running = &thread;
    position.thread = thread.index;
    penstock_emulator_switch_stack(&own_stack_pointer, thread.stack_pointer);
}

inline void Scheduler::wait(State state, const Meeting& meeting) {
    running->state = state;
    running->meeting = meeting;
    suspend();
}

inline void Scheduler::first_function_of_a_fiber() {
    scheduler->kernel.run();
    scheduler->running->state = State::exited;
    scheduler->suspend();
    std::abort();  // never reached: nobody resumes a thread that has exited
}

// Ends the launch; every fiber is abandoned where it stands.
inline void Scheduler::fail(const std::string& reason) {
    failure = ", thread " + std::to_string(thread_number()) + ": " + reason;
    suspend();
    std::abort();  // never reached
}

// The warp to which a thread belongs; the last warp of a block may have fewer lanes than the others.
inline std::span<Thread> Scheduler::warp_of(std::size_t thread) {
    const std::size_t first = thread / warp_size * warp_size;
    return std::span(threads).subspan(first, std::min<std::size_t>(warp_size, threads.size() - first));
}

// Waits until all lanes of the meeting have come. Returns what the source lane offered, or poison if it takes no part.
inline std::uint64_t Scheduler::meet_warp(Meeting meeting, std::uint64_t offered, int source_lane) {
    if (!(meeting.lanes >> lane() & 1))
        fail(std::string("the mask of ") + meeting.operation + " at " + describe(meeting.location) +
             " does not name the lane that calls it");
    meeting.lanes &= ~std::uint64_t{0} >> (64 - warp_of(thread_number()).size());
    running->offered = offered;
    running->source_lane = source_lane;
    wait(State::waiting_for_warp, meeting);
    return running->received;
}

// Finds the warp meetings at which nobody is missing, hands the values over and makes those lanes ready.
inline bool Scheduler::release_complete_warp_meetings() {
    bool released = false;
    for (std::size_t number = 0; number < threads.size(); ++number) {
        if (threads[number].state != State::waiting_for_warp) continue;
        const Meeting meeting = threads[number].meeting;
        const std::span<Thread> warp = warp_of(number);
        const auto takes_part = [&](std::size_t lane) { return lane < warp.size() && meeting.lanes >> lane & 1; };
        bool complete = true;
        std::uint64_t nonzero_offers = 0;
        for (std::size_t lane = 0; lane < warp.size() && complete; ++lane) {
            if (!takes_part(lane)) continue;
            complete = warp[lane].state == State::waiting_for_warp && warp[lane].meeting == meeting;
            nonzero_offers |= std::uint64_t{warp[lane].offered != 0} << lane;
        }
        if (!complete) continue;
        for (std::size_t lane = 0; lane < warp.size(); ++lane) {
            if (!takes_part(lane)) continue;
            const int source = warp[lane].source_lane;
            if (source == every_lane)
                warp[lane].received = nonzero_offers;
            else
                warp[lane].received = takes_part(source) ? warp[source].offered : poison_word;
            warp[lane].state = State::ready;
        }
        released = true;
    }
    return released;
}

inline bool Scheduler::release_complete_block_meeting() {
    for (const Thread& thread : threads)
        if (thread.state != State::waiting_for_block || !(thread.meeting == threads[0].meeting)) return false;
    for (Thread& thread : threads) thread.state = State::ready;
    return true;
}

}  // namespace penstock_emulator
