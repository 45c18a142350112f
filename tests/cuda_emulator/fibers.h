// Fibers: functions that can be left in the middle and gone on with later, each on a stack of its own.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

// Saves the registers that a function must preserve, and the stack pointer in *saved_stack_pointer; then goes on where
// the owner of next_stack_pointer left off (System V calling convention of x86-64).
extern "C" __attribute__((visibility("hidden"))) void penstock_emulator_switch_stack(void** saved_stack_pointer,
                                                                                     void* next_stack_pointer);
asm(R"(
    .text
    .globl penstock_emulator_switch_stack
    .hidden penstock_emulator_switch_stack
    .type penstock_emulator_switch_stack, @function
penstock_emulator_switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size penstock_emulator_switch_stack, . - penstock_emulator_switch_stack
)");

namespace penstock_emulator {

// The stacks of a block's threads, in memory that `make` has made. The lowest page of each is inaccessible: a thread whose
// local variables do not fit crashes the process instead of silently overwriting its neighbour.
class Stacks {
public:
    static constexpr std::size_t bytes_each = 256 * 1024;
    static constexpr std::size_t page_bytes = 4096;
    static constexpr std::size_t line_bytes = 64;

    // Making them takes longer than most launches, so all launches of all modules share them.
    static char* make(std::size_t count) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;  // pages come into being when first touched
        void* address = mmap(nullptr, count * bytes_each, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (address == MAP_FAILED) return nullptr;
        char* memory = static_cast<char*>(address);
        for (std::size_t stack = 0; stack < count; ++stack)
            mprotect(memory + stack * bytes_each, page_bytes, PROT_NONE);
        return memory;
    }

    explicit Stacks(char* memory) : memory(memory) {}

    // Lays out a stack as if `function` had been left just before its first instruction: the six saved registers, its
    // address, and a return address that it must never use.
    void* prepare(std::size_t stack, void (*function)()) {
        // Stacks that began at equal places in their pages would displace each other from the processor's cache.
        const std::size_t unused = stack % (page_bytes / line_bytes) * line_bytes;
        void** top = reinterpret_cast<void**>(memory + (stack + 1) * bytes_each - unused);
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(function);
        for (int saved_register = 0; saved_register < 6; ++saved_register) *--top = nullptr;
        return top;
    }

private:
    char* memory;
};

}  // namespace penstock_emulator
