// States of a batch of rows, in a pool [L, P, ...] of recurrent layers.
//
// The first operands of each kernel are the pool, layer i32 [], sources i32 [B] and entries i32 [B]. Row b
// reads the state of entry sources[b], or zeros if there is no such entry. It writes its new state to entry
// entries[b], or nowhere if there is no such entry. The results are the pool, in the same buffer, and the
// outputs. Rows that read the same entry are advanced together. If one of them also writes this entry, it is
// the last of them, so that all of them read the old state.
#pragma once

#include "frame.h"
#include "units.h"

namespace {

constexpr int NUM_SHARED = 4;  // number of operands that all kernels have
constexpr int64_t PART_BYTES = 64 * 1024;  // bytes of the states that a thread takes at a time

struct StateRows {
  char* pool;
  const int32_t *sources, *entries;
  int64_t layer, P, B, entry_bytes;

  // Reads the first operands. `element_bytes` is the size of an element of the pool.
  explicit StateRows(XLA_FFI_CallFrame* frame, int64_t element_bytes) {
    const XLA_FFI_Buffer *before = argument(frame, 0), *after = result(frame, 0);
    pool = (char*)after->data;
    layer = *(const int32_t*)argument(frame, 1)->data;
    sources = (const int32_t*)argument(frame, 2)->data;
    entries = (const int32_t*)argument(frame, 3)->data;
    P = before->dims[1], B = argument(frame, 2)->dims[0];
    entry_bytes = element_bytes;
    for (int64_t i = 2; i < before->rank; i++) entry_bytes *= before->dims[i];
    if (before->data != after->data)  // XLA has not aliased the buffers
      memcpy(pool, before->data, before->dims[0] * P * entry_bytes);
  }

  bool is_entry(int64_t entry) const { return entry >= 0 && entry < P; }

  // Returns a pointer to an entry, or null if there is no such entry.
  template <class Element>
  Element* find(int64_t entry) const {
    return is_entry(entry) ? (Element*)(pool + (layer * P + entry) * entry_bytes) : nullptr;
  }

  bool shares(int64_t row, int64_t other) const {
    return sources[row] == sources[other] && is_entry(sources[row]);
  }

  // If `row` is the first row that reads its source, calls `advance` for all rows that read this source.
  template <class Advance>
  void for_sharers(int64_t row, Advance advance) const {
    for (int64_t other = 0; other < row; other++)
      if (shares(row, other)) return;
    int64_t in_place = -1;
    for (int64_t other = row; other < B; other++) {
      if (other != row && !shares(row, other)) continue;
      if (is_entry(sources[other]) && entries[other] == sources[other])
        in_place = other;
      else
        advance(other);
    }
    if (in_place >= 0) advance(in_place);
  }

  // Number of heads that a thread takes at a time, if an entry has H heads.
  int64_t heads_of_part(int64_t H) const { return 1 + (PART_BYTES - 1) / (entry_bytes / H); }

  int64_t parts_of_row(int64_t H) const {
    return (H + heads_of_part(H) - 1) / heads_of_part(H);
  }

  // Number of parts of all rows. A part is some heads of all rows that read the same entry.
  int64_t count_parts(int64_t H) const { return B * parts_of_row(H); }

  // Calls `advance` with the rows and heads of a part.
  template <class Advance>
  void for_heads(int64_t part, int64_t H, Advance advance) const {
    int64_t first = part % parts_of_row(H) * heads_of_part(H);
    int64_t last = smaller(first + heads_of_part(H), H);
    for_sharers(part / parts_of_row(H), [&](int64_t row) {
      for (int64_t head = first; head < last; head++) advance(row, head);
    });
  }
};

}  // namespace
