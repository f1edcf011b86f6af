// Attention over the paged cache. New keys and values are written to their blocks, then each token of
// the pass attends to its row's, reading the blocks where they lie.
//
// A block holds 16 tokens of one head. Its keys are transposed and its values are not, so that 16 lanes are
// 16 tokens while scores are made, and 16 dimensions while values are mixed; bfloat16 goes in pairs of
// neighbours of the summed index, as the dot-product instruction wants it (P = 2, else P = 1):
//   keys [D / P][16][P], values [16 / P][D][P].
// Tokens that share leading blocks (a group's prompt, the tokens of one prompt) form an item and read each
// shared block once. What a token gets does not depend on its item: every sum runs over the blocks in order.
#pragma GCC optimize("no-associative-math")

#include <ATen/ops/empty.h>

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#define UNI_DOT_BF16 1
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "bind.h"
#include "simd.h"

namespace uni {
namespace {

constexpr int64_t kBlock = 16;
// Queries that one round of the inner loops serves: their sums must fit the registers.
constexpr int64_t kTile = 4;

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), aligned(4), may_alias));

template <class T>
constexpr int64_t kPair = sizeof(T) == 2 ? 2 : 1;

// acc += a * b over one lane vector of memory; `a` is a float, or a pair of bfloat16 as they lie in memory.
inline void multiply_add(Lanes& acc, float a, const float* b) {
  acc += a * *reinterpret_cast<const Lanes*>(b);
}

inline void multiply_add(Lanes& acc, uint32_t a, const bf16* b) {
#ifdef UNI_DOT_BF16
  acc = (Lanes)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)),
                                (__m512bh)_mm512_loadu_si512(b));
#else
  Bits both = *reinterpret_cast<const Bits*>(b);
  uint32_t low = a << 16, high = a & 0xffff0000u;
  float first, second;
  std::memcpy(&first, &low, 4);
  std::memcpy(&second, &high, 4);
  acc += first * (Lanes)(both << 16);
  acc += second * (Lanes)(both & 0xffff0000u);
#endif
}

// What a query or a probability is in `multiply_add`: a float, or two bfloat16.
template <class T>
struct Factor;
template <>
struct Factor<float> {
  using type = float;
};
template <>
struct Factor<bf16> {
  using type = uint32_t;
};

template <class T>
inline void prefetch_block(const T* p, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(p + i);
}

// scores[m][16 b + lane] = q[m] . keys of `count` blocks; M queries, 2 blocks at a time.
template <class T, int64_t D, int M, int N>
inline void score_tile(const typename Factor<T>::type* q, const T* const* blocks, float* scores,
                       int64_t stride) {
  constexpr int64_t P = kPair<T>;
  Lanes acc[M][N] = {};
  for (int64_t d = 0; d < D / P; d++) {
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 2
      for (int n = 0; n < N; n++) multiply_add(acc[m][n], q[m * (D / P) + d], blocks[n] + d * kBlock * P);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; m++) {
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) *reinterpret_cast<Lanes*>(scores + m * stride + n * kBlock) = acc[m][n];
  }
}

template <class T, int64_t D, int N>
inline void score_blocks(const typename Factor<T>::type* q, int64_t queries, const T* const* blocks,
                         float* scores, int64_t stride) {
  constexpr int64_t width = D / kPair<T>;
  int64_t m = 0;
  for (; m + kTile <= queries; m += kTile) {
    score_tile<T, D, kTile, N>(q + m * width, blocks, scores + m * stride, stride);
  }
  q += m * width, scores += m * stride;
  switch (queries - m) {
    case 3: score_tile<T, D, 3, N>(q, blocks, scores, stride); break;
    case 2: score_tile<T, D, 2, N>(q, blocks, scores, stride); break;
    case 1: score_tile<T, D, 1, N>(q, blocks, scores, stride); break;
    default: break;
  }
}

// out[m][0..64) += sum over blocks of probs[m] * values; C vectors of 16 dimensions at a time.
template <class T, int64_t D, int M, int C>
inline void mix_tile(const typename Factor<T>::type* probs, int64_t stride, const T* values,
                     const int64_t* offsets, int64_t count, float* out) {
  constexpr int64_t P = kPair<T>, steps = kBlock / P;
  Lanes acc[M][C];
  for (int m = 0; m < M; m++) {
    for (int c = 0; c < C; c++) acc[m][c] = *reinterpret_cast<Lanes*>(out + m * D + c * 16);
  }
  for (int64_t b = 0; b < count; b++) {
    const T* block = values + offsets[b];
    for (int64_t t = 0; t < steps; t++) {
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          multiply_add(acc[m][c], probs[m * stride + b * steps + t], block + (t * D + c * 16) * P);
        }
      }
    }
  }
  for (int m = 0; m < M; m++) {
    for (int c = 0; c < C; c++) *reinterpret_cast<Lanes*>(out + m * D + c * 16) = acc[m][c];
  }
}

template <class T, int64_t D>
inline void mix_blocks(const typename Factor<T>::type* probs, int64_t stride, int64_t queries,
                       const T* values, const int64_t* offsets, int64_t count, float* out) {
  constexpr int C = D >= 64 ? 4 : D / 16;
  for (int64_t d = 0; d < D; d += 16 * C) {
    const T* from = values + d * kPair<T>;
    int64_t m = 0;
    for (; m + kTile <= queries; m += kTile) {
      mix_tile<T, D, kTile, C>(probs + m * stride, stride, from, offsets, count, out + m * D + d);
    }
    const auto* rest = probs + m * stride;
    float* to = out + m * D + d;
    switch (queries - m) {
      case 3: mix_tile<T, D, 3, C>(rest, stride, from, offsets, count, to); break;
      case 2: mix_tile<T, D, 2, C>(rest, stride, from, offsets, count, to); break;
      case 1: mix_tile<T, D, 1, C>(rest, stride, from, offsets, count, to); break;
      default: break;
    }
  }
}

inline void pack(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }

inline void pack(const float* from, uint32_t* to, int64_t n) {
  auto* halves = reinterpret_cast<bf16*>(to);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) store(halves + i, from[i]);
}

struct Shape {
  float scale, softcap;
  int64_t window;
};

// exp(score - max) over tokens [begin, end) of `size`, 0 elsewhere; returns the sum.
inline float exponentials(float* s, int64_t size, int64_t begin, int64_t end, const Shape& shape) {
  float scale = shape.scale, cap = shape.softcap;
  if (cap > 0) {
    for (int64_t t = begin; t < end; t++) s[t] = cap * std::tanh(s[t] * scale / cap);
  } else {
#pragma omp simd
    for (int64_t t = begin; t < end; t++) s[t] *= scale;
  }
  float top = -INFINITY;
#pragma omp simd reduction(max : top)
  for (int64_t t = begin; t < end; t++) top = s[t] > top ? s[t] : top;
  std::fill(s, s + begin, -INFINITY);
  std::fill(s + end, s + size, -INFINITY);
  Lanes sums = {};
  for (int64_t t = 0; t < size; t += kBlock) {
    // a row without any finite score stays NaN, as its logits then are
#pragma omp simd
    for (int64_t i = t; i < t + kBlock; i++) s[i] = fast_exp(s[i] - top);
    sums += *reinterpret_cast<Lanes*>(s + t);
  }
  float sum = 0;
  for (int i = 0; i < 16; i++) sum += sums[i];
  return sum;
}

template <class T, int64_t D>
struct Pass {
  using F = typename Factor<T>::type;
  static constexpr int64_t P = kPair<T>;

  const T *q, *keys, *values;
  int64_t q_token, q_head;  // strides
  T* out;
  int64_t heads, kv_heads, width;
  const int32_t *tables, *row, *position;
  Shape shape;

  int64_t offset(int64_t token, int64_t index, int64_t head) const {
    return (tables[row[token] * width + index] * kv_heads + head) * kBlock * D;
  }

  void score(const F* packed, int64_t queries, int64_t token, int64_t head, int64_t from, int64_t to,
             float* scores, int64_t stride) const {
    int64_t b = from;
    for (; b + 2 <= to; b += 2) {
      const T* pair[2] = {keys + offset(token, b, head), keys + offset(token, b + 1, head)};
      if (b + 4 <= to) {
        prefetch_block(keys + offset(token, b + 2, head), kBlock * D);
        prefetch_block(keys + offset(token, b + 3, head), kBlock * D);
      }
      score_blocks<T, D, 2>(packed, queries, pair, scores + b * kBlock, stride);
    }
    if (b < to) {
      const T* one[1] = {keys + offset(token, b, head)};
      score_blocks<T, D, 1>(packed, queries, one, scores + b * kBlock, stride);
    }
  }

  void mix(const F* probs, int64_t stride, int64_t queries, int64_t token, int64_t head, int64_t from,
           int64_t to, float* mixed, std::vector<int64_t>& offsets) const {
    offsets.clear();
    for (int64_t b = from; b < to; b++) offsets.push_back(offset(token, b, head));
    mix_blocks<T, D>(probs + from * (kBlock / P), stride, queries, values, offsets.data(), to - from, mixed);
  }

  // Tokens [0, n) of an item, whose first `joint` blocks are the same, for one key head.
  void run(const int32_t* tokens, int64_t n, int64_t joint, int64_t head) const {
    static thread_local std::vector<float> scores, mixed, sums;
    static thread_local std::vector<F> packed, probs;
    static thread_local std::vector<int64_t> offsets;
    const int64_t group = heads / kv_heads, queries = n * group;
    int64_t longest = 0, first = INT64_MAX;
    for (int64_t i = 0; i < n; i++) {
      longest = std::max<int64_t>(longest, position[tokens[i]] + 1);
      first = std::min(first, begin_of(tokens[i]));
    }
    const int64_t base = first / kBlock, stride = (longest + kBlock - 1) / kBlock * kBlock;
    grow(scores, queries * stride), grow(mixed, queries * D), grow(sums, queries);
    grow(packed, queries * D / P), grow(probs, queries * stride / P);
    for (int64_t i = 0; i < n; i++) {
      for (int64_t g = 0; g < group; g++) {
        const T* from = q + tokens[i] * q_token + (head * group + g) * q_head;
        std::memcpy(&packed[(i * group + g) * D / P], from, D * sizeof(T));
      }
    }
    if (base < joint) score(&packed[0], queries, tokens[0], head, base, joint, &scores[0], stride);
    for (int64_t i = 0; i < n; i++) {
      const int64_t end = position[tokens[i]] + 1, own = std::max(base, joint);
      const int64_t blocks = (end + kBlock - 1) / kBlock;
      float* s = &scores[i * group * stride];
      if (own < blocks) score(&packed[i * group * D / P], group, tokens[i], head, own, blocks, s, stride);
      const int64_t size = std::max(blocks, joint) * kBlock - base * kBlock;
      for (int64_t g = 0; g < group; g++) {
        float* from = s + g * stride + base * kBlock;
        const int64_t skipped = base * kBlock;
        sums[i * group + g] =
            exponentials(from, size, begin_of(tokens[i]) - skipped, end - skipped, shape);
        pack(from, &probs[((i * group + g) * stride + skipped) / P], size);
      }
    }
    std::fill_n(mixed.begin(), queries * D, 0.f);
    if (base < joint) {
      mix(&probs[0], stride / P, queries, tokens[0], head, base, joint, &mixed[0], offsets);
    }
    for (int64_t i = 0; i < n; i++) {
      const int64_t own = std::max(base, joint), blocks = (position[tokens[i]] + kBlock) / kBlock;
      if (own < blocks) {
        mix(&probs[i * group * stride / P], stride / P, group, tokens[i], head, own, blocks,
            &mixed[i * group * D], offsets);
      }
      for (int64_t g = 0; g < group; g++) {
        T* to = out + (tokens[i] * heads + head * group + g) * D;
        const float *from = &mixed[(i * group + g) * D], inverse = 1.f / sums[i * group + g];
#pragma omp simd
        for (int64_t d = 0; d < D; d++) store(to + d, from[d] * inverse);
      }
    }
  }

  int64_t begin_of(int64_t token) const {
    return shape.window > 0 ? std::max<int64_t>(0, position[token] + 1 - shape.window) : 0;
  }

  template <class V>
  static void grow(std::vector<V>& v, int64_t n) {
    if (static_cast<int64_t>(v.size()) < n) v.resize(n);
  }
};

template <class T>
void write_tokens(const at::Tensor& k, const at::Tensor& v, T* keys, T* values, const int32_t* tables,
                  int64_t width, const int32_t* row, const int32_t* position) {
  constexpr int64_t P = kPair<T>;
  const int64_t tokens = k.size(0), heads = k.size(1), dim = k.size(2);
  const T *from_k = k.const_data_ptr<T>(), *from_v = v.const_data_ptr<T>();
  at::parallel_for(0, tokens, 1 + 16384 / (heads * dim), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      const int64_t block = tables[row[n] * width + position[n] / kBlock], at = position[n] % kBlock;
      for (int64_t h = 0; h < heads; h++) {
        T* to_k = keys + (block * heads + h) * kBlock * dim + at * P;
        T* to_v = values + (block * heads + h) * kBlock * dim + at / P * dim * P + at % P;
        const T *key = from_k + n * k.stride(0) + h * k.stride(1),
                *value = from_v + n * v.stride(0) + h * v.stride(1);
        for (int64_t d = 0; d < dim; d++) to_k[d / P * kBlock * P + d % P] = key[d];
        for (int64_t d = 0; d < dim; d++) to_v[d * P] = value[d];
      }
    }
  });
}

struct Plan {
  const at::Tensor &tables, &row, &position, &starts, &tokens, &joint;
};

template <class T, int64_t D>
void attend_items(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, at::Tensor& out,
                  const Plan& plan, const Shape& shape) {
  Pass<T, D> pass{q.const_data_ptr<T>(),
                  keys.const_data_ptr<T>(),
                  values.const_data_ptr<T>(),
                  q.stride(0),
                  q.stride(1),
                  out.mutable_data_ptr<T>(),
                  q.size(1),
                  keys.size(1),
                  plan.tables.size(1),
                  plan.tables.const_data_ptr<int32_t>(),
                  plan.row.const_data_ptr<int32_t>(),
                  plan.position.const_data_ptr<int32_t>(),
                  shape};
  const int32_t *starts = plan.starts.const_data_ptr<int32_t>(), *joint = plan.joint.const_data_ptr<int32_t>();
  const int32_t* tokens = plan.tokens.const_data_ptr<int32_t>();
  const int64_t kv_heads = pass.kv_heads, work = plan.joint.size(0) * kv_heads;
  // items differ in size: each thread takes the next one when it is done with the last
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), work), 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; thread++) {
      for (int64_t i = next++; i < work; i = next++) {
        const int64_t item = i / kv_heads;
        pass.run(tokens + starts[item], starts[item + 1] - starts[item], joint[item], i % kv_heads);
      }
    }
  });
}

template <class T>
void attend_typed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& keys,
                  at::Tensor& values, at::Tensor& out, const Plan& plan, const Shape& shape) {
  write_tokens<T>(k, v, keys.mutable_data_ptr<T>(), values.mutable_data_ptr<T>(),
                  plan.tables.const_data_ptr<int32_t>(), plan.tables.size(1),
                  plan.row.const_data_ptr<int32_t>(), plan.position.const_data_ptr<int32_t>());
  switch (q.size(2)) {
    case 32: attend_items<T, 32>(q, keys, values, out, plan, shape); break;
    case 64: attend_items<T, 64>(q, keys, values, out, plan, shape); break;
    case 128: attend_items<T, 128>(q, keys, values, out, plan, shape); break;
    case 256: attend_items<T, 256>(q, keys, values, out, plan, shape); break;
    default: TORCH_CHECK(false, "attend serves head sizes 32, 64, 128 and 256, got ", q.size(2));
  }
}

// q [N, Hq, D], k and v [N, Hk, D], keys and values [blocks, Hk, 16, D] (laid out as above) -> [N, Hq, D].
// tables int32[rows, width]; row and position int32[N]; item i has the places tokens[starts[i]:starts[i + 1]]
// of the pass, int32, and their rows share the first joint[i] blocks. softcap and window 0: none.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor keys,
                  at::Tensor values, const at::Tensor& tables, const at::Tensor& row,
                  const at::Tensor& position, const at::Tensor& starts, const at::Tensor& tokens,
                  const at::Tensor& joint, double scale, double softcap, int64_t window) {
  TORCH_CHECK(q.stride(2) == 1 && k.stride(2) == 1 && v.stride(2) == 1 && keys.is_contiguous() &&
                  values.is_contiguous() && tables.is_contiguous() && keys.size(2) == kBlock,
              "attend wants contiguous heads, tables and blocks of 16");
  at::Tensor out = at::empty(q.sizes(), q.options());
  Plan plan{tables, row, position, starts, tokens, joint};
  Shape shape{static_cast<float>(scale), static_cast<float>(softcap), window};
  if (q.scalar_type() == at::kBFloat16) {
    attend_typed<bf16>(q, k, v, keys, values, out, plan, shape);
  } else {
    attend_typed<float>(q, k, v, keys, values, out, plan, shape);
  }
  return out;
}

}  // namespace

static Bind bind_attention([](pybind11::module_& m) {
  m.def("attend", &attend, pybind11::call_guard<pybind11::gil_scoped_release>());
});

}  // namespace uni
