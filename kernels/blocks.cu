// Copies of blocks within a device's memory.
//
// The pool is layer-first [planes, slots, unit]; what crosses the bus is block-first [blocks, planes, unit]. Both are seen here
// as rows of `vectors` vectors: a row is one plane of one block. A vector is 16 bytes where a unit is a multiple of that, else 8.
// Neighbouring threads move neighbouring vectors of a row, so that reads and writes are coalesced whatever the slots are. Rows go
// over blocks of threads and threadIdx.y: the divisions that find a row's place are paid once a row, not once a vector. Offsets
// are 64 bits wide, since a pool may hold more than 2^31 vectors; there are fewer than 2^31 rows, which the launcher checks.
//
// The same source is compiled for the host, where `host.cuh` makes loops of blocks and threads.

#ifdef __CUDACC__
#define KERNEL extern "C" __global__
#define UNROLL _Pragma("unroll 4")
struct alignas(16) Vector16 { unsigned int part[4]; };
struct alignas(8) Vector8 { unsigned int part[2]; };
#else
#include "host.cuh"
#endif

typedef long long Index;

// Where the pool keeps plane `first + row % planes` of the block in `slots[row / planes]`.
__device__ __forceinline__ Index place(const int* slots, unsigned int row, unsigned int planes, unsigned int first,
                                       unsigned int pool_slots, unsigned int vectors) {
    const unsigned int block = row / planes;
    const unsigned int plane = first + (row - block * planes);
    return (Index(plane) * pool_slots + slots[block]) * vectors;
}

#define FOR_EACH_ROW(row, rows) \
    for (unsigned int row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += gridDim.x * blockDim.y)

template <typename Vector>
__device__ __forceinline__ void copy_row(const Vector* __restrict__ from, Vector* __restrict__ to, unsigned int vectors) {
    UNROLL
    for (unsigned int at = threadIdx.x; at < vectors; at += blockDim.x) to[at] = from[at];
}

// gather:  into[i] = planes first..first+planes of the block in slots[i].
// scatter: planes first..first+planes of the block in slots[i] = source[i].
// copy:    block to[i] of the pool = block from[i], a fork; no slot is in both lists.
#define KERNELS(SIZE)                                                                                                        \
    KERNEL void gather_##SIZE(const Vector##SIZE* __restrict__ pool, const int* __restrict__ slots,                          \
                              Vector##SIZE* __restrict__ into, unsigned int rows, unsigned int planes, unsigned int first,   \
                              unsigned int pool_slots, unsigned int vectors) {                                               \
        FOR_EACH_ROW(row, rows)                                                                                              \
        copy_row(pool + place(slots, row, planes, first, pool_slots, vectors), into + Index(row) * vectors, vectors);        \
    }                                                                                                                        \
    KERNEL void scatter_##SIZE(const Vector##SIZE* __restrict__ source, const int* __restrict__ slots,                       \
                               Vector##SIZE* __restrict__ pool, unsigned int rows, unsigned int planes, unsigned int first,  \
                               unsigned int pool_slots, unsigned int vectors) {                                              \
        FOR_EACH_ROW(row, rows)                                                                                              \
        copy_row(source + Index(row) * vectors, pool + place(slots, row, planes, first, pool_slots, vectors), vectors);      \
    }                                                                                                                        \
    KERNEL void copy_##SIZE(Vector##SIZE* pool, const int* __restrict__ from, const int* __restrict__ to, unsigned int rows, \
                            unsigned int planes, unsigned int pool_slots, unsigned int vectors) {                            \
        FOR_EACH_ROW(row, rows)                                                                                              \
        copy_row(pool + place(from, row, planes, 0, pool_slots, vectors), pool + place(to, row, planes, 0, pool_slots, vectors), \
                 vectors);                                                                                                   \
    }

KERNELS(16)
KERNELS(8)

#ifndef __CUDACC__
HOST_ENTRIES(16)
HOST_ENTRIES(8)
#endif
