// Advances the states of the gated delta rule by one token per row. The states are in a pool.
//
// Operands after those in `state_rows.h`: q and k f32 [B, K, D], v f32 [B, K, G, U], log_decay
// f32 [B, K, G, D] or [B, K, G, 1], beta f32 [B, K, G]. The pool is f32 [L, P, K * G, D, U], the output
// f32 [B, K, G, U]. Each head reads its state twice: first from memory to compute the output, then from the
// second-level cache to compute the new state.

#include "state_rows.h"

namespace {

// Number of vectors of columns that are processed together. Their sums fit into the registers.
constexpr int COLUMNS = LANES == 16 ? 8 : 4;

struct DeltaStep {
  StateRows rows;
  const float *q, *k, *v, *log_decay, *beta;
  float* out;
  int64_t K, H, D, U, decays;

  // Factors of a head: decay, key, decayed key and decayed query.
  struct Factors {
    float decay[MAX_D], key[MAX_D], decayed_key[MAX_D], decayed_query[MAX_D];
    float beta, product;
  };

  void run(int64_t part) const {
    rows.for_heads(part, H, [&](int64_t row, int64_t head) { advance(row, head); });
  }

  void advance(int64_t row, int64_t head) const {
    Factors factors;
    prepare(factors, row, head);
    int64_t offset = head * D * U, vectors = row * H * U + head * U;
    const float* from = rows.find<const float>(rows.sources[row]);
    float* to = rows.find<float>(rows.entries[row]);
    from = from ? from + offset : nullptr, to = to ? to + offset : nullptr;
    int64_t u = 0;
    for (; u + COLUMNS * LANES <= U; u += COLUMNS * LANES)
      advance_columns<COLUMNS, Floats>(factors, from, to, u, v + vectors, out + vectors);
    for (; u + LANES <= U; u += LANES)
      advance_columns<1, Floats>(factors, from, to, u, v + vectors, out + vectors);
    for (; u < U; u++) advance_columns<1, float>(factors, from, to, u, v + vectors, out + vectors);
  }

  void prepare(Factors& factors, int64_t row, int64_t head) const {
    int64_t key_head = (row * K + head / (H / K)) * D, gate = row * H + head;
    const float* logs = log_decay + gate * decays;
    factors.beta = beta[gate];
    factors.product = 0;
    for (int64_t d = 0; d < D; d++) factors.decay[d] = logs[decays == 1 ? 0 : d];
    for (int64_t d = D; d % LANES; d++) factors.decay[d] = 0;
    for (int64_t d = 0; d < D; d += LANES)
      store(factors.decay + d, exponential(load<Floats>(factors.decay + d)));
    for (int64_t d = 0; d < D; d++) {
      factors.key[d] = k[key_head + d];
      factors.decayed_key[d] = factors.decay[d] * k[key_head + d];
      factors.decayed_query[d] = factors.decay[d] * q[key_head + d];
      factors.product += q[key_head + d] * k[key_head + d];
    }
  }

  // Advances N vectors of columns of a state, from column `u` on. The output is computed from the old state.
  template <int N, class Vector>
  void advance_columns(
      const Factors& factors, const float* from, float* to, int64_t u, const float* values,
      float* outputs) const {
    constexpr int WIDTH = sizeof(Vector) / sizeof(float);
    Vector predicted[N] = {}, kept[N] = {}, change[N];
    for (int64_t d = 0; from && d < D; d++)
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        Vector state = load<Vector>(from + d * U + u + i * WIDTH);
        predicted[i] += factors.decayed_key[d] * state;
        kept[i] += factors.decayed_query[d] * state;
      }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      change[i] = factors.beta * (load<Vector>(values + u + i * WIDTH) - predicted[i]);
      Vector output = kept[i] + factors.product * change[i];
      memcpy(outputs + u + i * WIDTH, &output, sizeof output);
    }
    for (int64_t d = 0; to && d < D; d++)
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        int64_t place = d * U + u + i * WIDTH;
        Vector state = factors.key[d] * change[i];
        if (from) state += factors.decay[d] * load<Vector>(from + place);
        memcpy(to + place, &state, sizeof state);
      }
  }
};

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  DeltaStep call = {StateRows(frame, sizeof(float))};
  const XLA_FFI_Buffer *pool = argument(frame, 0), *key = argument(frame, NUM_SHARED + 1);
  auto floats = [&](int i) { return (const float*)argument(frame, NUM_SHARED + i)->data; };
  call.q = floats(0), call.k = floats(1), call.v = floats(2);
  call.log_decay = floats(3), call.beta = floats(4);
  call.decays = argument(frame, NUM_SHARED + 3)->dims[3];
  call.out = (float*)result(frame, 1)->data;
  call.K = key->dims[1], call.H = pool->dims[2], call.D = pool->dims[3], call.U = pool->dims[4];
  in_parallel(frame, call, call.rows.count_parts(call.H));
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_delta_step(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
