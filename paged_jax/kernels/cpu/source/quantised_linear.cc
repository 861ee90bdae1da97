// Computes x @ w.T for a quantised weight. See `quantised_call.h` for the operands. The result is f32 [M, N].
// Rows of zeros give zeros and take no time.

#include "quantised_call.h"

namespace {

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  QuantisedCall call(frame);
  auto* out = (float*)result(frame, 0)->data;
  auto panels = call.panels(out);
  bool has_memory = panels.reserve(call.M, 1);
  if (has_memory) {
    panels.add(0, call.M);
    in_parallel(frame, panels, panels.num_panels);
    Product product = {call.matrix(0, 1), panels.panels, panels.num_panels, out};
    product.divide(num_threads(frame));
    if (panels.num_panels) in_parallel(frame, product, product.num_parts);
  }
  panels.release();
  if (has_memory) return nullptr;
  return error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "linear: no memory");
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_quantised_linear(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
