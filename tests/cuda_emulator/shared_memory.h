// The shared memory of one thread block, static and dynamic. Blocks run one after another and use the same bytes, which
// are poisoned before every block: reading what the block has not written shows as an absurd number.
#pragma once

#include <link.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace penstock_emulator {

using Bytes = std::span<unsigned char>;

constexpr unsigned char poison_byte = 0xCD;
constexpr std::uint64_t poison_word = 0xCDCDCDCDCDCDCDCD;
constexpr unsigned char guard_byte = 0xE7;

// Static shared memory is declared `static thread_local`, for one reason: the linker then puts exactly these variables,
// also those of kernel templates (for which g++ ignores a section attribute), into one segment of the library, which
// can be found at run time. All fibers run in one thread of the operating system, so they do share it.
#define __shared__ static thread_local

inline thread_local char segment_anchor;  // a variable that is known to lie in the segment

inline int find_segment(dl_phdr_info* library, std::size_t, void* result) {
    const auto* start = static_cast<unsigned char*>(library->dlpi_tls_data);
    if (start == nullptr) return 0;
    for (int index = 0; index < library->dlpi_phnum; ++index) {
        if (library->dlpi_phdr[index].p_type != PT_TLS) continue;
        const std::size_t bytes = library->dlpi_phdr[index].p_memsz;
        const auto* anchor = reinterpret_cast<unsigned char*>(&segment_anchor);
        if (anchor < start || anchor >= start + bytes) continue;
        *static_cast<Bytes*>(result) = Bytes(const_cast<unsigned char*>(start), bytes);
        return 1;
    }
    return 0;
}

class SharedMemory {
public:
    explicit SharedMemory(std::size_t dynamic_bytes) : chunks((dynamic_bytes + sizeof(Chunk) - 1) / sizeof(Chunk) + 2) {
        segment_anchor = 0;  // the first access lets the C library allocate the segment for this thread
        dl_iterate_phdr(find_segment, &static_memory);
        const Bytes all(chunks.front().bytes, chunks.size() * sizeof(Chunk));
        guard_before = all.first(sizeof(Chunk));
        dynamic_memory = all.subspan(sizeof(Chunk), dynamic_bytes);
        guard_after = all.subspan(sizeof(Chunk) + dynamic_bytes);
        std::ranges::fill(all, guard_byte);
    }
    void poison() {
        std::ranges::fill(static_memory, poison_byte);
        std::ranges::fill(dynamic_memory, poison_byte);
    }
    // Whether a thread wrote just before or behind the dynamic shared memory.
    bool overrun() const {
        const auto changed = [](unsigned char byte) { return byte != guard_byte; };
        return std::ranges::any_of(guard_before, changed) || std::ranges::any_of(guard_after, changed);
    }
    void* dynamic() const { return dynamic_memory.data(); }

private:
    struct alignas(128) Chunk {
        unsigned char bytes[128];
    };
    std::vector<Chunk> chunks;
    Bytes static_memory, guard_before, dynamic_memory, guard_after;
};

}  // namespace penstock_emulator
