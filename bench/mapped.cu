// Copies between the pool of a device and slots of pinned host memory without a stage: the kernel itself reads or writes over the bus.
//
// What `gpu_rates` compares with a gather and the copy engine, so that a card can decide. Rows and vectors are those of the
// product's kernels; the host's slots are block-first, `slot` vectors apart. A row is written by neighbouring threads, so that what
// crosses the bus is whole lines of 128 bytes where a row is as long.

#ifdef __CUDACC__
#define KERNEL extern "C" __global__
#define UNROLL _Pragma("unroll 4")
struct alignas(16) Vector16 { unsigned int part[4]; };
#else
#include "host.cuh"
#endif

typedef long long Index;

#define ROWS(row, rows) for (unsigned int row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += gridDim.x * blockDim.y)

// Where the pool keeps a row, and where the host does.
#define PLACES                                                                                    \
    const unsigned int block = row / planes;                                                      \
    const unsigned int plane = row - block * planes;                                              \
    const Index in_pool = (Index(first + plane) * pool_slots + slots[block]) * vectors;           \
    const Index in_host = Index(host_slots[block]) * slot + Index(first + plane) * vectors;

KERNEL void mapped_down(const Vector16* __restrict__ pool, const int* __restrict__ slots, Vector16* __restrict__ host,
                        const int* __restrict__ host_slots, unsigned int rows, unsigned int planes, unsigned int first,
                        unsigned int pool_slots, unsigned int vectors, unsigned int slot) {
    ROWS(row, rows) {
        PLACES
        UNROLL
        for (unsigned int at = threadIdx.x; at < vectors; at += blockDim.x) host[in_host + at] = pool[in_pool + at];
    }
}

KERNEL void mapped_up(Vector16* __restrict__ pool, const int* __restrict__ slots, const Vector16* __restrict__ host,
                      const int* __restrict__ host_slots, unsigned int rows, unsigned int planes, unsigned int first,
                      unsigned int pool_slots, unsigned int vectors, unsigned int slot) {
    ROWS(row, rows) {
        PLACES
        UNROLL
        for (unsigned int at = threadIdx.x; at < vectors; at += blockDim.x) pool[in_pool + at] = host[in_host + at];
    }
}

#ifndef __CUDACC__
extern "C" void host_mapped_down(Launch how, const Vector16* pool, const int* slots, Vector16* host, const int* host_slots,
                                 unsigned int rows, unsigned int planes, unsigned int first, unsigned int pool_slots,
                                 unsigned int vectors, unsigned int slot) {
    launch(how, [=] { mapped_down(pool, slots, host, host_slots, rows, planes, first, pool_slots, vectors, slot); });
}
extern "C" void host_mapped_up(Launch how, Vector16* pool, const int* slots, const Vector16* host, const int* host_slots,
                               unsigned int rows, unsigned int planes, unsigned int first, unsigned int pool_slots,
                               unsigned int vectors, unsigned int slot) {
    launch(how, [=] { mapped_up(pool, slots, host, host_slots, rows, planes, first, pool_slots, vectors, slot); });
}
#endif
