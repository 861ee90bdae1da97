// Advances causal convolutions by one token per row. The states are in a pool. A state is the last w - 1 inputs.
//
// Operands after those in `state_rows.h`: x [B, F] in the dtype of the pool, filters f32 [w, F], bias f32 [F],
// num_tokens i32 [B]. The pool is [L, P, (w - 1) * F], the output f32 [B, F]. A row without a token keeps its
// state.

#include "state_rows.h"

namespace {

using Type = ELEMENT;
using Element = Type::Element;

struct ConvolutionStep {
  StateRows rows;
  const Element* x;
  const float *filters, *bias;
  const int32_t* num_tokens;
  float* out;
  int64_t width, F, channels_of_part, parts_of_row;

  void run(int64_t part) {
    int64_t first = part % parts_of_row * channels_of_part;
    int64_t last = smaller(first + channels_of_part, F);
    rows.for_sharers(part / parts_of_row, [&](int64_t row) { advance(row, first, last); });
  }

  void advance(int64_t row, int64_t first, int64_t last) const {
    const Element* from = rows.find<const Element>(rows.sources[row]);
    Element* to = rows.find<Element>(rows.entries[row]);
    const Element* added = x + row * F;
    float* output = out + row * F;
    int64_t f = first;
    for (; f + LANES <= last; f += LANES) convolve(from, added, f, output);
    if (f < last) convolve_rest(from, added, f, last - f, output);
    if (!to) return;
    bool has_token = num_tokens[row] > 0;
    size_t bytes = (last - first) * sizeof(Element);
    for (int64_t i = 0; i < width - 1; i++) {  // in ascending order, because `from` and `to` may be equal
      int64_t old = has_token ? i + 1 : i;
      const Element* input = old == width - 1 ? added + first : from + old * F + first;
      if (!from && old < width - 1)
        memset(to + i * F + first, 0, bytes);
      else if (input != to + i * F + first)
        memcpy(to + i * F + first, input, bytes);
    }
  }

  static Floats widened(const Element* from) {
    if constexpr (Type::IN_ORDER) return Type::half(from, 0);
    return (Floats)(widen(from) << 16);  // bfloat16
  }

  // Computes LANES outputs.
  void convolve(const Element* from, const Element* added, int64_t f, float* output) const {
    Floats total = load<Floats>(bias + f);
    for (int64_t i = from ? 0 : width - 1; i < width; i++)
      total += load<Floats>(filters + i * F + f) * widened((i < width - 1 ? from + i * F : added) + f);
    store(output + f, total);
  }

  // Computes the outputs of the last `count` channels, fewer than LANES.
  void convolve_rest(
      const Element* from, const Element* added, int64_t f, int64_t count, float* output) const {
    memcpy(output + f, bias + f, count * sizeof *output);
    for (int64_t i = from ? 0 : width - 1; i < width; i++) {
      Element inputs[LANES] = {};
      memcpy(inputs, (i < width - 1 ? from + i * F : added) + f, count * sizeof *inputs);
      Floats wide = widened(inputs);
      for (int64_t j = 0; j < count; j++) output[f + j] += filters[i * F + f + j] * wide[j];
    }
  }
};

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  ConvolutionStep call = {StateRows(frame, sizeof(Element))};
  const XLA_FFI_Buffer* filters = argument(frame, NUM_SHARED + 1);
  call.x = (const Element*)argument(frame, NUM_SHARED)->data;
  call.filters = (const float*)filters->data;
  call.bias = (const float*)argument(frame, NUM_SHARED + 2)->data;
  call.num_tokens = (const int32_t*)argument(frame, NUM_SHARED + 3)->data;
  call.out = (float*)result(frame, 1)->data;
  call.width = filters->dims[0], call.F = filters->dims[1];
  call.channels_of_part = round_up(1 + PART_BYTES / (call.width * (int64_t)sizeof(Element)), LANES);
  call.parts_of_row = (call.F + call.channels_of_part - 1) / call.channels_of_part;
  in_parallel(frame, call, call.rows.B * call.parts_of_row);
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_convolution_step(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
