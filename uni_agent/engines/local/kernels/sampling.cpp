// From logits to tokens in two passes over a row: the largest, then the sums that the inverse of the
// cumulative distribution is found in.
#pragma GCC optimize("no-associative-math")

#include <ATen/ops/empty.h>

#include <limits>
#include <vector>

#include "bind.h"
#include "simd.h"

namespace uni {
namespace {

constexpr int64_t kChunk = 256;

struct Drawn {
  int32_t id;
  float logprob;
};

inline float largest(const float* x, int64_t n) {
  float top = -INFINITY;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
  return top;
}

// Sum of exp((x - top) * rate) over a chunk, in 16 lanes.
inline float chunk_sum(const float* x, int64_t n, float top, float rate) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
#pragma omp simd
    for (int j = 0; j < 16; j++) lanes[j] += fast_exp((x[i + j] - top) * rate);
  }
  for (; i < n; i++) lanes[0] += fast_exp((x[i] - top) * rate);
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

Drawn draw_row(const float* x, int64_t size, float temperature, double uniform) {
  static thread_local std::vector<float> sums;
  const bool greedy = temperature <= 0;
  const float rate = greedy ? 1.f : 1.f / temperature, top = largest(x, size);
  sums.clear();
  double total = 0;
  for (int64_t i = 0; i < size; i += kChunk) {
    sums.push_back(chunk_sum(x + i, std::min(kChunk, size - i), top, rate));
    total += sums.back();
  }
  int64_t id = 0;
  if (greedy) {
    while (id + 1 < size && !(x[id] == top)) id++;
  } else if (total == total) {
    const double target = uniform * total;
    double below = 0;
    size_t chunk = 0;
    for (size_t last = 0; last < sums.size(); last++) {
      if (sums[last] > 0) chunk = last;  // should rounding leave nothing behind, the last that has any
    }
    double before = 0;
    for (size_t c = 0; c < chunk; c++) {
      if (before + sums[c] > target) {
        chunk = c;
        break;
      }
      before += sums[c];
    }
    below = before;
    const int64_t begin = static_cast<int64_t>(chunk) * kChunk, end = std::min(begin + kChunk, size);
    id = begin;
    for (int64_t i = begin; i < end; i++) {
      const float p = fast_exp((x[i] - top) * rate);
      if (p > 0) id = i;
      below += p;
      if (p > 0 && below > target) break;
    }
  }
  return {static_cast<int32_t>(id), static_cast<float>((x[id] - top) * rate - std::log(total))};
}

// float32[n, V], float32[n], float64[n] in [0, 1) -> int32[n], float32[n]: one draw per row and its logprob at
// the row's temperature; temperature 0 takes the first of the largest, with its logprob at temperature 1.
std::tuple<at::Tensor, at::Tensor> sample(const at::Tensor& logits, const at::Tensor& temperature,
                                          const at::Tensor& uniform) {
  TORCH_CHECK(logits.is_contiguous() && logits.scalar_type() == at::kFloat, "sample wants float32[n, V]");
  const int64_t rows = logits.size(0), size = logits.size(1);
  at::Tensor ids = at::empty({rows}, logits.options().dtype(at::kInt));
  at::Tensor logprobs = at::empty({rows}, logits.options());
  const float *x = logits.const_data_ptr<float>(), *heat = temperature.const_data_ptr<float>();
  const double* number = uniform.const_data_ptr<double>();
  auto* id = ids.mutable_data_ptr<int32_t>();
  auto* logprob = logprobs.mutable_data_ptr<float>();
  at::parallel_for(0, rows, 1 + 16384 / size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Drawn drawn = draw_row(x + i * size, size, heat[i], number[i]);
      id[i] = drawn.id, logprob[i] = drawn.logprob;
    }
  });
  return {ids, logprobs};
}

}  // namespace

static Bind bind_sampling([](pybind11::module_& m) {
  m.def("sample", &sample, pybind11::call_guard<pybind11::gil_scoped_release>());
});

}  // namespace uni
