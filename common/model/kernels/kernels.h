// The kernels that others call, as their own files define them.
#pragma once

#include <cstdint>

#include "vec.h"

EXPORT void rms_norm(int64_t dtype, int64_t threads, int64_t rows, int64_t size, const void* x,
                     int64_t stride, const void* weight, double eps, void* out);

EXPORT void add_rms_norm(int64_t dtype, int64_t threads, int64_t rows, int64_t size,
                         const void* residual, const void* x, const void* weight, double eps,
                         void* total, void* out);

EXPORT void silu_and_mul(int64_t dtype, int64_t threads, int64_t rows, int64_t size, const void* x,
                         void* out);

EXPORT void rotate_and_cache(int64_t dtype, int64_t threads, int64_t tokens, int64_t heads,
                             int64_t kv_heads, int64_t dim, int64_t block_size, int64_t format,
                             void* qkv, const void* q_norm, const void* k_norm, double eps,
                             const void* cos, const void* sin, uint8_t* keys, uint8_t* values,
                             const int64_t* slots);

EXPORT void paged_attention(int64_t dtype, int64_t threads, int64_t sequences, int64_t heads,
                            int64_t kv_heads, int64_t dim, int64_t block_size, int64_t format,
                            int64_t window, int64_t chunked, double scale, const void* query,
                            int64_t query_stride, const void* keys, const void* values,
                            const int32_t* rows, const int32_t* counts, const int32_t* starts,
                            const int32_t* skipped, const int32_t* tables, int64_t table_stride,
                            void* out);

EXPORT void linear(int64_t dtype, int64_t threads, int64_t count, int64_t rows, int64_t inputs,
                   int64_t block, const void* x, int64_t stride, const void* weight,
                   const void* scales, const void* bias, int64_t partial, void* out);

EXPORT void grouped_linear(int64_t dtype, int64_t threads, int64_t count, const void* x,
                           int64_t stride, const void* matrix, const void* bias, int64_t partial,
                           void* out);
