// Operands of the kernel for quantised weights, in this order:
//
//   x        f32 [M, K]
//   values   [L, X, N, K], or values of B bits [L, X, N, K * B / 8]; for one weight (X = 1) also [L, N, ...]
//   scales   floats [L, X, N, groups] or [L, N, groups]; or scales of two levels, int8 [..., N, columns]
//   table    f32 [2 ** B], the numbers that values of B bits stand for
//   layer    i32 [], the layer to read
//   mins     minima like the scales, only if the attribute `has_mins` is set
//   order    i32 [L, K], the input of each column, only if the attribute `has_order` is set
//   sizes    i32 [X], the number of rows that each weight multiplies
//
// If the attribute `is_interleaved` is set, values, scales and minima are stored as in `bundles.h`.
#pragma once

#include "quantised_product.h"

namespace {

struct QuantisedCall {
  XLA_FFI_Buffer *x, *values, *scales, *mins, *order, *sizes;
  Decoder decoder;
  int64_t layer, M, N, X;
  Groups groups;
  bool is_interleaved;

  explicit QuantisedCall(XLA_FFI_CallFrame* frame)
      : decoder((const float*)argument(frame, 3)->data) {
    x = argument(frame, 0), values = argument(frame, 1), scales = argument(frame, 2);
    layer = *(const int32_t*)argument(frame, 4)->data;
    int next = 5;
    mins = attribute<int32_t>(frame, "has_mins") ? argument(frame, next++) : nullptr;
    order = attribute<int32_t>(frame, "has_order") ? argument(frame, next++) : nullptr;
    is_interleaved = attribute<int32_t>(frame, "is_interleaved");
    sizes = argument(frame, next);
    M = x->dims[0], X = sizes->dims[0], N = values->dims[values->rank - 2];
    groups = Groups::divide<Decoder>(x->dims[1], count_groups(scales, x->dims[1]));
  }

  // Returns the weight of a group.
  Matrix matrix(int64_t group) const {
    int64_t first_row = (layer * X + group) * N;
    return {rows(values, first_row), rows(scales, first_row), mins ? rows(mins, first_row) : ByteRows{},
            kind(scales),            kind(mins),              &decoder,
            N,                       groups,                 is_interleaved};
  }

  Panels<Decoder, Cells> panels(float* out) const {
    Panels<Decoder, Cells> panels = {};
    panels.x = (const float*)x->data;
    if (order) panels.order = (const int32_t*)order->data + layer * groups.num_inputs;
    panels.is_rounded = ROUNDS<INPUT>;
    panels.has_sums = mins;
    panels.groups = groups;
    panels.out = out;
    panels.N = N;
    return panels;
  }

  static ByteRows rows(const XLA_FFI_Buffer* buffer, int64_t first) {
    int64_t num_rows = 1, bytes = buffer->dims[buffer->rank - 1] * size(buffer);
    for (int64_t i = 0; i + 1 < buffer->rank; i++) num_rows *= buffer->dims[i];
    auto* begin = (const uint8_t*)buffer->data;
    return {begin + first * bytes, bytes, begin + num_rows * bytes};
  }

  // Returns the number of groups, from the columns of the scales. In scales of two levels, four columns of each
  // section are its factor.
  static int count_groups(const XLA_FFI_Buffer* scales, int64_t num_inputs) {
    int64_t columns = scales->dims[scales->rank - 1];
    return kind(scales) == TWO_LEVELS ? columns - 4 * (num_inputs / Sections::INPUTS) : columns;
  }

  static int64_t size(const XLA_FFI_Buffer* buffer) {
    if (buffer->dtype == XLA_FFI_DataType_F32) return 4;
    return buffer->dtype == XLA_FFI_DataType_F16 || buffer->dtype == XLA_FFI_DataType_BF16 ? 2 : 1;
  }

  static ScaleKind kind(const XLA_FFI_Buffer* buffer) {
    if (!buffer || buffer->dtype == XLA_FFI_DataType_F32) return FLOAT32;
    if (buffer->dtype == XLA_FFI_DataType_S8) return TWO_LEVELS;
    return buffer->dtype == XLA_FFI_DataType_BF16 ? BFLOAT16 : FLOAT16;
  }
};

}  // namespace
