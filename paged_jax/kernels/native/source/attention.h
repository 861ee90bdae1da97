// Code shared by decode and prefill: the operands, and the locations of tokens in the pools. Both add a tile
// of tokens at a time to an online softmax (Milakov and Gimelshein, 2018). A tile is a list of rows of the
// pools, so its tokens can be in any blocks. Tiles and segments of tiles start at multiples of their sizes, so
// they do not depend on the batch or on the first token that a query sees.
#pragma once

#include "frame.h"
#include "products.h"

namespace {

using Type = ELEMENT;  // dtype of the pools, a compiler option
using Element = Type::Element;

constexpr int TILE = 32;      // tokens
constexpr int SEGMENT = 256;  // tokens, a multiple of TILE
// Initial peak of a softmax. It is finite, because the difference of two infinities is NaN.
constexpr float LOWEST = -__FLT_MAX__;
constexpr float UNSEEN = -__builtin_inff();  // masked score; its weight is 0 for any peak

// Tokens at consecutive positions, which start at place `from` of a tile. Tiles start at multiples of TILE.
struct Tile {
  int from, count;
  int64_t rows[TILE];  // row of each token in the pools and in the scales
};

// The functions below use `add_product`, because compilers may fuse x * y + z into one operation in one place,
// and round twice in another place.

// Returns x * scale + y.
inline Floats scaled_sum(Floats x, Floats scale, Floats y) {
  add_product(y, x, scale);
  return y;
}

// Returns x * x_weight + y * y_weight.
inline Floats merged(Floats x, Floats x_weight, Floats y, Floats y_weight) {
  return scaled_sum(y, y_weight, x * x_weight);
}

struct Attention {
  const Element *k, *v;
  const float *k_scale, *v_scale, *sinks;
  const int32_t *tables, *lengths;
  int64_t P, K, C, M, lanes, v_lanes, layer;
  // Distances between neighbouring blocks, heads and tokens, in rows of the pools.
  int64_t block_step, head_step, token_step;
  int H, G, D, U;              // D elements of a query and of a key; U elements of a value and of an output
  int window;                  // size of the sliding window, or 0
  bool shares_values;          // values are the first elements of the keys
  float scale, soft_cap;       // soft_cap is 0 for no cap

  // Reads the operands that decode and prefill have in common. Returns the index of the next operand.
  int read(XLA_FFI_CallFrame* frame) {
    const XLA_FFI_Buffer *q = argument(frame, 0), *keys = argument(frame, 1);
    const XLA_FFI_Buffer *values = argument(frame, 2), *table = argument(frame, 3);
    k = (const Element*)keys->data;
    v = (const Element*)values->data;
    tables = (const int32_t*)table->data;
    M = table->dims[1];
    lengths = (const int32_t*)argument(frame, 4)->data;
    layer = *(const int32_t*)argument(frame, 5)->data;
    int next = 6;
    if (attribute<int32_t>(frame, "has_scales")) {
      k_scale = (const float*)argument(frame, next++)->data;
      v_scale = (const float*)argument(frame, next++)->data;
    }
    if (attribute<int32_t>(frame, "has_sinks")) sinks = (const float*)argument(frame, next++)->data;
    // If the keys contain the values, the array of keys is also passed as the array of values.
    shares_values = attribute<int32_t>(frame, "shares_values");
    if (attribute<int32_t>(frame, "is_interleaved")) {
      // Both arrays are the pages [P, C, 2 * K, D], or [P, C, 1, D] if the keys contain the values.
      P = keys->dims[0], C = keys->dims[1], token_step = keys->dims[2], lanes = keys->dims[3];
      head_step = shares_values ? 1 : 2;
      K = token_step / head_step;
      if (!shares_values) v += lanes;
      block_step = C * token_step;
    } else {  // [L, P, K, C, lanes]
      P = keys->dims[1], K = keys->dims[2], C = keys->dims[3], lanes = keys->dims[4];
      token_step = 1, head_step = C;
      block_step = K * head_step;
    }
    v_lanes = values->dims[values->rank - 1];
    const XLA_FFI_Buffer* out = result(frame, 0);
    H = q->dims[q->rank - 2], D = q->dims[q->rank - 1], U = out->dims[out->rank - 1];
    G = H / K;
    scale = attribute<float>(frame, "scale");
    soft_cap = attribute<float>(frame, "soft_cap");
    window = attribute<int32_t>(frame, "sliding_window");
    return next;
  }

  bool has_sink(int h) const { return sinks && sinks[h] != -__builtin_inff(); }

  // Returns the tokens from position `token` to the end of its tile. It has no tokens from position `end` on.
  Tile find(const int32_t* table, int64_t head, int token, int end) const {
    Tile tile = {};
    tile.from = token % TILE;
    int room = TILE - tile.from;
    if (token < end) tile.count = end - token < room ? end - token : room;
    int64_t column = token / C, offset = token % C;
    for (int i = 0; i < tile.count; column++, offset = 0) {
      int64_t block = table[column];
      block = block < 0 ? 0 : block < P ? block : P - 1;  // an invalid id must not crash the process
      int64_t first = (layer * P + block) * block_step + head * head_step;
      for (; offset < C && i < tile.count; offset++) tile.rows[i++] = first + offset * token_step;
    }
    return tile;
  }
};

}  // namespace
