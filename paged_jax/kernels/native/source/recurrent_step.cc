// Advances the states of recurrent layers by one token per row: the gated delta rule, or Mamba-2. The states
// are in a pool.
//
// Operands after those in `state_rows.h`: q and k f32 [B, K, D], v f32 [B, K, G, U], log_decay f32 [B, K, G, D]
// or [B, K, G, 1], and beta f32 [B, K, G] for the delta rule. The output is f32 [B, K, G, U]. The layout of the
// f32 pool depends on the rule:
//
//   delta rule  [L, P, K * G, D, U]  Each head reads its state twice: first from memory to compute the output,
//                                    then from the second-level cache to compute the new state.
//   Mamba-2     [L, P, K * G, U, D]  Each state is read and written in one pass.

#include "state_rows.h"

namespace {

constexpr int MAX_D = 1024;  // maximum number of elements of a key: the size of arrays on the stack

// Number of vectors of columns that are processed together. Their sums fit into the registers.
constexpr int COLUMNS = LANES == 16 ? 8 : 4;

struct RecurrentStep {
  StateRows rows;
  const float *q, *k, *v, *log_decay, *beta;  // beta is null for Mamba-2
  float* out;
  int64_t K, H, D, U, decays;

  // A head of a row. `from` is null if the old state is zeros, and `to` if the new state is not stored.
  struct Head {
    const float *from, *query, *key, *values;
    float *to, *outputs;
    float decay[MAX_D];
  };

  // Factors of the delta rule: decayed key, decayed query, and product of key and query.
  struct Factors {
    float key[MAX_D], query[MAX_D], product, beta;
  };

  void run(int64_t part) const {
    rows.for_heads(part, H, [&](int64_t row, int64_t head) { advance(row, head); });
  }

  void advance(int64_t row, int64_t head) const {
    int64_t keys = (row * K + head / (H / K)) * D, gate = row * H + head;
    Head each = {rows.find<const float>(rows.sources[row]), q + keys, k + keys, v + gate * U,
                 rows.find<float>(rows.entries[row]), out + gate * U};
    if (each.from) each.from += head * D * U;
    if (each.to) each.to += head * D * U;
    exponentiate(log_decay + gate * decays, each.decay);
    if (beta)
      apply_delta_rule(each, beta[gate]);
    else
      for (int64_t u = 0; u < U; u++) each.outputs[u] = advance_value(each, u);
  }

  // Computes the decay of each element of a key, in whole vectors.
  void exponentiate(const float* logs, float* decay) const {
    if (decays == 1) {
      Floats decay_of_all = exponential(fill(*logs));
      for (int64_t d = 0; d < D; d += LANES) store(decay + d, decay_of_all);
      return;
    }
    memcpy(decay, logs, D * sizeof *decay);
    for (int64_t d = D; d % LANES; d++) decay[d] = 0;
    for (int64_t d = 0; d < D; d += LANES) store(decay + d, exponential(load<Floats>(decay + d)));
  }

  void apply_delta_rule(const Head& head, float beta) const {
    Factors factors;
    factors.beta = beta, factors.product = 0;
    for (int64_t d = 0; d < D; d++) {
      factors.key[d] = head.decay[d] * head.key[d];
      factors.query[d] = head.decay[d] * head.query[d];
      factors.product += head.query[d] * head.key[d];
    }
    int64_t u = 0;
    for (; u + COLUMNS * LANES <= U; u += COLUMNS * LANES) advance_columns<COLUMNS, Floats>(head, factors, u);
    for (; u + LANES <= U; u += LANES) advance_columns<1, Floats>(head, factors, u);
    for (; u < U; u++) advance_columns<1, float>(head, factors, u);
  }

  // Advances N vectors of columns of a state [D, U], from column `u` on. The output is computed from the old
  // state.
  template <int N, class Vector>
  void advance_columns(const Head& head, const Factors& factors, int64_t u) const {
    constexpr int WIDTH = sizeof(Vector) / sizeof(float);
    const float* from = head.from;
    Vector predicted[N] = {}, kept[N] = {}, change[N];
    for (int64_t d = 0; from && d < D; d++)
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        Vector state = load<Vector>(from + d * U + u + i * WIDTH);
        predicted[i] += factors.key[d] * state;
        kept[i] += factors.query[d] * state;
      }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      change[i] = factors.beta * (load<Vector>(head.values + u + i * WIDTH) - predicted[i]);
      Vector output = kept[i] + factors.product * change[i];
      memcpy(head.outputs + u + i * WIDTH, &output, sizeof output);
    }
    for (int64_t d = 0; head.to && d < D; d++) {
      float key = head.key[d], decay = head.decay[d];
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        int64_t place = d * U + u + i * WIDTH;
        Vector state = key * change[i];
        if (from) state += decay * load<Vector>(from + place);
        memcpy(head.to + place, &state, sizeof state);
      }
    }
  }

  // Advances row `u` of a state [U, D], and returns its dot product with the query.
  float advance_value(const Head& head, int64_t u) const {
    const float* from = head.from ? head.from + u * D : nullptr;
    float* to = head.to ? head.to + u * D : nullptr;
    float value = head.values[u];
    Floats sums = {};
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES) {
      Floats state = value * load<Floats>(head.key + d);
      if (from) state += load<Floats>(head.decay + d) * load<Floats>(from + d);
      if (to) store(to + d, state);
      sums += state * load<Floats>(head.query + d);
    }
    float total = sum(sums);
    for (; d < D; d++) {
      float state = value * head.key[d] + (from ? head.decay[d] * from[d] : 0.0f);
      if (to) to[d] = state;
      total += state * head.query[d];
    }
    return total;
  }
};

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame) {
  RecurrentStep call = {StateRows(frame, sizeof(float))};
  auto operand = [&](int i) { return argument(frame, NUM_SHARED + i); };
  auto floats = [&](int i) { return (const float*)operand(i)->data; };
  call.q = floats(0), call.k = floats(1), call.v = floats(2), call.log_decay = floats(3);
  call.beta = frame->args.size > NUM_SHARED + 4 ? floats(4) : nullptr;
  call.decays = operand(3)->dims[3];
  call.out = (float*)result(frame, 1)->data;
  call.K = operand(0)->dims[1], call.D = operand(0)->dims[2];
  call.H = argument(frame, 0)->dims[2], call.U = operand(2)->dims[3];
  in_parallel(frame, call, call.rows.count_parts(call.H));
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* paged_jax_recurrent_step(XLA_FFI_CallFrame* frame) {
  return answers_metadata(frame) ? nullptr : run(frame);
}
