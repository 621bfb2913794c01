// Makes plain functions of the kernels: `launch` runs every thread of every block, one after the other, in an order that `seed` draws.
// What depends on the order of threads, or touches memory that is not its own, is seen.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

struct Three {
    unsigned int x, y;
};

static thread_local Three threadIdx, blockIdx, blockDim, gridDim;

#define __device__ static
#define __forceinline__ inline
#define __restrict__
#define KERNEL static
#define UNROLL

static thread_local std::uint64_t moved;

// A vector that counts how often one was assigned.
template <int Parts>
struct alignas(Parts * 4) Counted {
    std::uint32_t part[Parts];
    Counted& operator=(const Counted& other) {
        ++moved;
        for (int at = 0; at < Parts; ++at) part[at] = other.part[at];
        return *this;
    }
};
using Vector16 = Counted<4>;
using Vector8 = Counted<2>;

// Vectors that the last launch in this thread moved.
extern "C" std::uint64_t host_moved() { return moved; }

struct Launch {
    unsigned int grid, width, height, seed;
};

template <typename Kernel>
static void launch(const Launch& how, Kernel kernel) {
    std::vector<std::uint64_t> order(std::uint64_t(how.grid) * how.width * how.height);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(how.seed));
    moved = 0;
    gridDim = {how.grid, 1};
    blockDim = {how.width, how.height};
    for (const std::uint64_t one : order) {
        const auto within = static_cast<unsigned int>(one % (how.width * how.height));
        blockIdx = {static_cast<unsigned int>(one / (how.width * how.height)), 0};
        threadIdx = {within % how.width, within / how.width};
        kernel();
    }
}

#define HOST_ENTRIES(SIZE)                                                                                                      \
    extern "C" void host_gather_##SIZE(Launch how, const Vector##SIZE* pool, const int* slots, Vector##SIZE* into,              \
                                       unsigned int rows, unsigned int planes, unsigned int first, unsigned int pool_slots,     \
                                       unsigned int vectors) {                                                                  \
        launch(how, [=] { gather_##SIZE(pool, slots, into, rows, planes, first, pool_slots, vectors); });                       \
    }                                                                                                                           \
    extern "C" void host_scatter_##SIZE(Launch how, const Vector##SIZE* source, const int* slots, Vector##SIZE* pool,           \
                                        unsigned int rows, unsigned int planes, unsigned int first, unsigned int pool_slots,    \
                                        unsigned int vectors) {                                                                 \
        launch(how, [=] { scatter_##SIZE(source, slots, pool, rows, planes, first, pool_slots, vectors); });                    \
    }                                                                                                                           \
    extern "C" void host_copy_##SIZE(Launch how, Vector##SIZE* pool, const int* from, const int* to, unsigned int rows,         \
                                     unsigned int planes, unsigned int pool_slots, unsigned int vectors) {                      \
        launch(how, [=] { copy_##SIZE(pool, from, to, rows, planes, pool_slots, vectors); });                                   \
    }
