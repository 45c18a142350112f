// Reports of bad memory accesses. With sanitize=True g++ puts a test before every access through a null pointer or a
// pointer that is not aligned for its type, and before every index into an array of known size; where the test fails
// the compiled code calls one of the functions below. Usually libubsan provides them and ends the process; defined
// here, they end the launch with a message instead. The layout of their first argument is that of the compiler's ubsan
// library.
#pragma once

#include <cstdint>
#include <string>

#include "scheduler.h"

namespace penstock_emulator {

struct CheckedPlace {
    const char* file;
    std::uint32_t line, column;

    std::string described() const { return std::string(" at ") + file + ":" + std::to_string(line); }
};

struct CheckedType {
    std::uint16_t kind, information;
    char name[1];  // goes on behind the struct, ends with a null character, in quotes
};

struct PointerCheck {
    CheckedPlace place;
    const CheckedType* type;
    unsigned char alignment_exponent, access_kind;
};

struct IndexCheck {
    CheckedPlace place;
    const CheckedType* array_type;
    const CheckedType* index_type;
};

}  // namespace penstock_emulator

extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_type_mismatch_v1_abort(
    const penstock_emulator::PointerCheck* check, std::uintptr_t address) {
    const std::string type = std::string("an object of type ") + check->type->name;
    const std::string place = check->place.described();
    if (address == 0) penstock_emulator::scheduler->fail("access through a null pointer to " + type + place);
    penstock_emulator::scheduler->fail("misaligned access to " + type + place + ": the address is not a multiple of " +
                                       std::to_string(1 << check->alignment_exponent) + " bytes");
}

extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_out_of_bounds_abort(
    const penstock_emulator::IndexCheck* check, std::uintptr_t index) {
    penstock_emulator::scheduler->fail("index " + std::to_string(static_cast<std::intptr_t>(index)) +
                                       " is outside an array of type " + check->array_type->name +
                                       check->place.described());
}
