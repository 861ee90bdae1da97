// Fills an array with zeros, without touching most of its memory.
//
// On Linux, the pages within the array are given back to the system, which supplies pages of zeros when they are
// used again. So a large pool takes no time to create, and takes memory only for the blocks that are written.

#include <stdint.h>

#include "frame.h"
#include "vectors.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

using Element = ELEMENT::Element;

void set_zeros(char* begin, char* end) {
#if defined(__linux__)
  uintptr_t page = sysconf(_SC_PAGESIZE);
  char* first = (char*)(((uintptr_t)begin + page - 1) / page * page);
  char* last = (char*)((uintptr_t)end / page * page);
  if (first < last && !madvise(first, last - first, MADV_DONTNEED)) {
    memset(begin, 0, first - begin);
    begin = last;
  }
#endif
  memset(begin, 0, end - begin);
}

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer* out = result(frame, 0);
  int64_t bytes = sizeof(Element);
  for (int64_t i = 0; i < out->rank; i++) bytes *= out->dims[i];
  set_zeros((char*)out->data, (char*)out->data + bytes);
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_zeros(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
