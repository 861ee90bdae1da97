// Advances the states of Mamba-2 by one token per row. The states are in a pool.
//
// Operands after those in `state_rows.h`: x f32 [B, K, G, U], b and c f32 [B, K, D], log_decay f32 [B, K, G].
// The pool is f32 [L, P, K * G, U, D], the output f32 [B, K, G, U]. Each state is read and written in one pass.

#include "state_rows.h"

namespace {

struct StateSpaceStep {
  StateRows rows;
  const float *x, *b, *c, *log_decay;
  float* out;
  int64_t K, H, U, D;

  void run(int64_t part) const {
    rows.for_heads(part, H, [&](int64_t row, int64_t head) { advance(row, head); });
  }

  void advance(int64_t row, int64_t head) const {
    int64_t key_head = (row * K + head / (H / K)) * D, gate = row * H + head;
    float decay = exponential(fill(log_decay[gate]))[0];
    const float* from = rows.find<const float>(rows.sources[row]);
    float* to = rows.find<float>(rows.entries[row]);
    for (int64_t u = 0; u < U; u++) {
      int64_t offset = (head * U + u) * D, vectors = gate * U + u;
      out[vectors] = advance_row(
          decay, x[vectors], b + key_head, c + key_head, from ? from + offset : nullptr,
          to ? to + offset : nullptr);
    }
  }

  // Advances a row of a state, and returns its dot product with `c`.
  float advance_row(
      float decay, float x, const float* b, const float* c, const float* from, float* to) const {
    Floats sums = {};
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES) {
      Floats state = x * load<Floats>(b + d);
      if (from) state += decay * load<Floats>(from + d);
      if (to) store(to + d, state);
      sums += state * load<Floats>(c + d);
    }
    float total = sum(sums);
    for (; d < D; d++) {
      float state = x * b[d] + (from ? decay * from[d] : 0.0f);
      if (to) to[d] = state;
      total += state * c[d];
    }
    return total;
  }
};

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  StateSpaceStep call = {StateRows(frame, sizeof(float))};
  const XLA_FFI_Buffer *pool = argument(frame, 0), *key = argument(frame, NUM_SHARED + 1);
  auto floats = [&](int i) { return (const float*)argument(frame, NUM_SHARED + i)->data; };
  call.x = floats(0), call.b = floats(1), call.c = floats(2), call.log_decay = floats(3);
  call.out = (float*)result(frame, 1)->data;
  call.K = key->dims[1], call.H = pool->dims[2], call.U = pool->dims[3], call.D = pool->dims[4];
  in_parallel(frame, call, call.rows.count_parts(call.H));
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_state_space_step(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
