// Computes x @ w.T for a few rows: x is f32 [M, K], the result is f32 [M, N].
//
// w [L, N, K] contains the weights of all layers. Only the given layer is read. Rows of zeros give zeros and
// take no time.

#include "weight_rows.h"

namespace {

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer *x = argument(frame, 0), *w = argument(frame, 1);
  int64_t layer = *(const int32_t*)argument(frame, 2)->data;
  Product product = {};
  int64_t M = x->dims[0], N = product.N = w->dims[1];
  int K = product.K = w->dims[2];
  product.w = (const Form::Weight*)w->data + layer * N * K;
  product.out = (float*)result(frame, 0)->data;
  Inputs inputs = {};
  bool has_memory = inputs.reserve(M, product.K);
  if (has_memory) {
    inputs.add(product, (const float*)x->data, 0, M);
    product.divide(num_threads(frame));
    in_parallel(frame, product, product.num_parts);
  }
  inputs.release();
  if (has_memory) return nullptr;
  return error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "linear: no memory");
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_linear(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
