// Matmul: each row of x is multiplied by the weight of its group. A plain matmul has one group.
//
// x [M, K] is bf16 if the weights are, else f32. The first sizes[0] rows belong to group 0, the next sizes[1]
// rows to group 1, and so on. w [L, X, N, K], or [L, N, K] for one group, contains the weights of all layers.
// sizes is i32 [X]. layer i32 [] is the only layer that is read. The result is f32 [M, N], 0 in rows without a
// group. Weights of groups without rows are not read. Rows of zeros give zeros and take no time.

#include "weight_rows.h"

namespace {

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer *x = argument(frame, 0), *w = argument(frame, 1);
  const XLA_FFI_Buffer* group_sizes = argument(frame, 2);
  const int32_t* sizes = (const int32_t*)group_sizes->data;
  int64_t layer = *(const int32_t*)argument(frame, 3)->data;
  int64_t M = x->dims[0], X = group_sizes->dims[0], N = w->dims[w->rank - 2];
  Product whole = {};
  whole.N = N;
  int K = whole.K = x->dims[1];
  whole.w = (const Form::Weight*)w->data + layer * X * N * K;
  whole.out = (float*)result(frame, 0)->data;
  whole.divide(num_threads(frame));
  auto* products = (Product*)malloc(X * sizeof(Product));
  Inputs inputs = {};
  if (!inputs.reserve(M, K) || !products) {
    inputs.release();
    free(products);
    return error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "linear: no memory");
  }
  int64_t num_products = 0, row = 0;
  for (int64_t group = 0; group < X; group++) {
    int64_t count = sizes[group] < M - row ? sizes[group] : M - row;
    if (count <= 0) continue;
    Product& product = products[num_products++] = whole;
    product.w += group * N * K;
    inputs.add(product, (const Number*)x->data, row, row + count);
    row += count;
  }
  memset(whole.out + row * N, 0, (M - row) * N * sizeof(float));
  Grouped<Product> all = {products, whole.num_parts};
  in_parallel(frame, all, num_products * all.parts_of_each);
  inputs.release();
  free(products);
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_linear(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
