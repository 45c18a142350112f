// What Python calls: for every kernel one function that lists its parameters and one that launches it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <tuple>
#include <type_traits>

#include "scheduler.h"
#include "shared_memory.h"

// Memory for the stacks of as many threads, or a null pointer.
extern "C" __attribute__((visibility("default"))) char* penstock_emulator_make_stacks(std::size_t threads) {
    return penstock_emulator::Stacks::make(threads);
}

namespace penstock_emulator {

// A type as NumPy would write it: "f8" for double, "i4" for int, "V16" for a struct; "*f8" for a pointer to double.
template <class Type>
std::string type_code() {
    if constexpr (std::is_pointer_v<Type>)
        return "*" + type_code<std::remove_cv_t<std::remove_pointer_t<Type>>>();
    else if constexpr (std::is_void_v<Type>)
        return "V0";
    else {
        const char* kind = std::is_same_v<Type, bool>       ? "b"
                           : std::is_floating_point_v<Type> ? "f"
                           : !std::is_integral_v<Type>      ? "V"
                           : std::is_signed_v<Type>         ? "i"
                                                            : "u";
        return kind + std::to_string(sizeof(Type));
    }
}

// The codes of a kernel's parameters, separated by spaces.
template <class... Parameters>
const char* parameter_codes(void (*)(Parameters...)) {
    static const std::string codes = ((type_code<std::remove_cv_t<Parameters>>() + " ") + ... + std::string());
    return codes.c_str();
}

template <class... Parameters>
struct KernelWithArguments : BoundKernel {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;

    void run() const override { std::apply(kernel, arguments); }
};

// Returns what went wrong, or a null pointer. `argument_addresses` says where the value of each argument lies, and `stacks`
// are those of as many threads as a block has at least.
template <class... Parameters>
const char* launch(void (*kernel)(Parameters...), const unsigned* grid, const unsigned* block, std::size_t shared_bytes,
                   std::uint64_t seed, char* stacks, const void* const* argument_addresses) {
    static std::string failure;
    KernelWithArguments<Parameters...> bound;
    bound.kernel = kernel;
    std::apply([&](auto&... value) { (std::memcpy(&value, *argument_addresses++, sizeof value), ...); },
               bound.arguments);
    try {
        SharedMemory shared_memory(shared_bytes);
        Scheduler play({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, seed, bound, shared_memory,
                       Stacks(stacks));
        failure = play.play_grid();
    } catch (const std::exception& error) {
        failure = error.what();
    }
    return failure.empty() ? nullptr : failure.c_str();
}

}  // namespace penstock_emulator
