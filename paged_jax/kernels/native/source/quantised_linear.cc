// Matmul with quantised weights: each row of x is multiplied by the weight of its group. A plain matmul has one
// group.
//
// See `quantised_call.h` for the operands. The first sizes[0] rows of x belong to group 0, the next sizes[1]
// rows to group 1, and so on. The result is f32 [M, N], 0 in rows without a group. Weights of groups without
// rows are not read. Rows of zeros give zeros and take no time.

#include "quantised_call.h"

namespace {

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  QuantisedCall call(frame);
  auto* sizes = (const int32_t*)call.sizes->data;
  auto* out = (float*)result(frame, 0)->data;
  int64_t X = call.X, num_products = 0, row = 0;
  auto panels = call.panels(out);
  auto* products = (Product*)malloc(X * sizeof(Product));
  if (!panels.reserve(call.M, X) || !products) {
    panels.release();
    free(products);
    return error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "linear: no memory");
  }
  for (int64_t group = 0; group < X; group++) {
    int64_t count = smaller(sizes[group], call.M - row), first = panels.num_panels;
    if (count <= 0) continue;
    panels.add(row, row + count);
    row += count;
    if (panels.num_panels == first) continue;
    products[num_products++] = {call.matrix(group), panels.panels + first, panels.num_panels - first, out};
  }
  memset(out + row * call.N, 0, (call.M - row) * call.N * sizeof(float));
  in_parallel(frame, panels, panels.num_panels);
  for (int64_t i = 0; i < num_products; i++) products[i].divide(num_threads(frame));
  if (num_products) {
    Grouped<Product> all = {products, products[0].num_parts};
    in_parallel(frame, all, num_products * all.parts_of_each);
  }
  panels.release();
  free(products);
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_quantised_linear(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
