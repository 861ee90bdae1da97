// Sets rows of an array in place. The operands are the array, index i32 [N], and the new rows [N, ...].
//
// The array is treated as rows with the size of the new rows. The result is the array, in the same buffer. New
// rows with an index out of range are dropped. Rows are copied as bytes, because XLA would convert a whole
// bfloat16 or fp8 array to a wider dtype and back.

#include "frame.h"
#include "vectors.h"

namespace {

using Element = ELEMENT::Element;

struct SetRows {
  char* rows;
  const int32_t* index;
  const char* added;
  int64_t R, N, row_bytes, rows_of_part;

  void run(int64_t part) {
    int64_t first = part * rows_of_part;
    int64_t last = first + rows_of_part < N ? first + rows_of_part : N;
    for (int64_t i = first; i < last; i++)
      if (index[i] >= 0 && index[i] < R)
        memcpy(rows + index[i] * row_bytes, added + i * row_bytes, row_bytes);
  }
};

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer *array = argument(frame, 0), *index = argument(frame, 1);
  const XLA_FFI_Buffer *added = argument(frame, 2), *out = result(frame, 0);
  SetRows call = {(char*)out->data, (const int32_t*)index->data, (const char*)added->data};
  call.N = index->dims[0];
  int64_t bytes = sizeof(Element);
  call.row_bytes = sizeof(Element);
  for (int64_t i = 0; i < array->rank; i++) bytes *= array->dims[i];
  for (int64_t i = 1; i < added->rank; i++) call.row_bytes *= added->dims[i];
  call.R = call.row_bytes > 0 ? bytes / call.row_bytes : 0;
  if (array->data != out->data)  // XLA has not aliased the buffers
    memcpy(out->data, array->data, bytes);
  constexpr int64_t PART_BYTES = 256 * 1024;
  call.rows_of_part = call.row_bytes < PART_BYTES ? PART_BYTES / (call.row_bytes + 1) + 1 : 1;
  in_parallel(frame, call, (call.N + call.rows_of_part - 1) / call.rows_of_part);
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_set_rows(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
