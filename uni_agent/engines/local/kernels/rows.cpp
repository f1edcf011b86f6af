#include "rows.h"

#include <ATen/ops/empty.h>

#include <vector>

#include "bind.h"
#include "simd.h"

namespace uni {

// Rows of one thread's share: about this many elements are worth waking a thread for.
static int64_t grain(int64_t width) { return 1 + 32768 / width; }

static float silu(float x) { return x / (1.f + fast_exp(-x)); }

static float gelu_tanh(float x) {
  float inner = 0.79788456f * (x + 0.044715f * x * x * x);
  return x / (1.f + fast_exp(-2.f * inner));  // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2y))
}

template <class T, float (*act)(float)>
static void gate_rows(const T* in, T* out, int64_t rows, int64_t width) {
  at::parallel_for(0, rows, grain(4 * width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const T *gate = in + 2 * i * width, *up = gate + width;
      T* to = out + i * width;
#pragma omp simd
      for (int64_t j = 0; j < width; j++) {
        store(to + j, round_to<T>(act(load(gate + j))) * load(up + j));
      }
    }
  });
}

template <class T>
static Tensor gated_of(const Tensor& in, bool gelu) {
  int64_t rows = in.size(0), width = in.size(1) / 2;
  Tensor out = at::empty({rows, width}, in.options());
  auto* kernel = gelu ? &gate_rows<T, gelu_tanh> : &gate_rows<T, silu>;
  kernel(in.const_data_ptr<T>(), out.mutable_data_ptr<T>(), rows, width);
  return out;
}

Tensor gated(const Tensor& gate_up, bool gelu) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.is_contiguous(), "gated wants a contiguous [N, 2I]");
  return gate_up.scalar_type() == at::kBFloat16 ? gated_of<bf16>(gate_up, gelu)
                                                : gated_of<float>(gate_up, gelu);
}

static float inverse_rms(const float* x, int64_t width, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < width; j++) sum += x[j] * x[j];
  return 1.f / std::sqrt(sum / width + eps);
}

template <class T>
static void add_row(T* x, const T* added, const float* post, const float* weight, T* out, float* row,
                    int64_t width, float eps) {
  if (added && post) {
#pragma omp simd
    for (int64_t j = 0; j < width; j++) row[j] = load(added + j);
    float inverse = inverse_rms(row, width, eps);
#pragma omp simd
    for (int64_t j = 0; j < width; j++) store(x + j, load(x + j) + round_to<T>(row[j] * inverse * post[j]));
  } else if (added) {
#pragma omp simd
    for (int64_t j = 0; j < width; j++) store(x + j, load(x + j) + load(added + j));
  }
#pragma omp simd
  for (int64_t j = 0; j < width; j++) row[j] = load(x + j);
  float inverse = inverse_rms(row, width, eps);
#pragma omp simd
  for (int64_t j = 0; j < width; j++) store(out + j, row[j] * inverse * weight[j]);
}

template <class T>
static Tensor add_norm_of(Tensor& x, const T* added, const float* post, const float* weight, float eps) {
  Tensor out = at::empty(x.sizes(), x.options());
  int64_t rows = x.size(0), width = x.size(1);
  T *to = out.mutable_data_ptr<T>(), *base = x.mutable_data_ptr<T>();
  at::parallel_for(0, rows, grain(width), [&](int64_t begin, int64_t end) {
    std::vector<float> row(width);
    for (int64_t i = begin; i < end; i++) {
      int64_t at = i * width;
      add_row<T>(base + at, added ? added + at : nullptr, post, weight, to + at, row.data(), width, eps);
    }
  });
  return out;
}

static const float* floats(const MaybeTensor& weight) {
  return weight ? weight->const_data_ptr<float>() : nullptr;
}

Tensor add_norm(Tensor x, const MaybeTensor& added, const MaybeTensor& post, const Tensor& weight,
                double eps) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "add_norm wants a contiguous x [N, H]");
  TORCH_CHECK(!added || (added->is_contiguous() && added->sizes() == x.sizes() && added->dtype() == x.dtype()),
              "add_norm wants both addends of one shape and dtype");
  const float *w = floats(weight), *p = floats(post);
  if (x.scalar_type() == at::kBFloat16) {
    return add_norm_of<bf16>(x, added ? added->const_data_ptr<bf16>() : nullptr, p, w, eps);
  }
  return add_norm_of<float>(x, added ? added->const_data_ptr<float>() : nullptr, p, w, eps);
}

// D as a template argument lets the loops unroll; 0 takes it from `dim`.
template <class T, int D>
static void turn_head(T* head, const float* weight, const float* cos, const float* sin, int64_t dim,
                      float eps) {
  const int64_t size = D ? D : dim, half = size / 2;
  float row[D ? D : 256];
#pragma omp simd
  for (int64_t j = 0; j < size; j++) row[j] = load(head + j);
  if (weight) {
    float inverse = inverse_rms(row, size, eps);
#pragma omp simd
    for (int64_t j = 0; j < size; j++) row[j] = round_to<T>(row[j] * inverse * weight[j]);
  }
#pragma omp simd
  for (int64_t j = 0; j < half; j++) {
    store(head + j, row[j] * cos[j] - row[j + half] * sin[j]);
    store(head + j + half, row[j + half] * cos[j + half] + row[j] * sin[j + half]);
  }
}

struct Heads {
  const float *q_norm, *k_norm, *cos, *sin;
  const int64_t* positions;
  int64_t rows, table, q, kv, dim;
  float eps;
};

template <class T, int D>
static void turn_rows(T* qkv, const Heads& h) {
  const int64_t stride = (h.q + 2 * h.kv) * h.dim;
  at::parallel_for(0, h.rows, grain(stride), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      T* row = qkv + i * stride;
      const float *cos = h.cos + h.positions[i] * h.dim, *sin = h.sin + h.positions[i] * h.dim;
      for (int64_t head = 0; head < h.q + h.kv; head++) {
        const float* weight = head < h.q ? h.q_norm : h.k_norm;
        turn_head<T, D>(row + head * h.dim, weight, cos, sin, h.dim, h.eps);
      }
    }
  });
}

template <class T>
static void turn(Tensor& qkv, const Heads& h) {
  T* base = qkv.mutable_data_ptr<T>();
  if (h.dim == 32) return turn_rows<T, 32>(base, h);
  if (h.dim == 64) return turn_rows<T, 64>(base, h);
  if (h.dim == 128) return turn_rows<T, 128>(base, h);
  turn_rows<T, 0>(base, h);
}

void norm_rope(Tensor qkv, const MaybeTensor& q_norm, const MaybeTensor& k_norm, const Tensor& cos,
               const Tensor& sin, const Tensor& positions, int64_t heads, int64_t kv_heads, double eps) {
  int64_t dim = cos.size(1), table = cos.size(0);
  TORCH_CHECK(qkv.dim() == 2 && qkv.is_contiguous() && qkv.size(1) == (heads + 2 * kv_heads) * dim,
              "norm_rope wants a contiguous [N, (Hq + 2 Hk) * D]");
  TORCH_CHECK(dim <= 256 && dim % 2 == 0, "norm_rope wants an even head size up to 256");
  TORCH_CHECK(positions.is_contiguous() && positions.numel() == qkv.size(0), "norm_rope wants int64[N]");
  Heads h{floats(q_norm), floats(k_norm), cos.const_data_ptr<float>(), sin.const_data_ptr<float>(),
          positions.const_data_ptr<int64_t>(), qkv.size(0), table, heads, kv_heads, dim,
          static_cast<float>(eps)};
  for (int64_t i = 0; i < h.rows; i++) {
    TORCH_CHECK(h.positions[i] >= 0 && h.positions[i] < table, "position ", h.positions[i], " is outside the ",
                table, " that the rotary table holds");
  }
  if (qkv.scalar_type() == at::kBFloat16) return turn<bf16>(qkv, h);
  turn<float>(qkv, h);
}

static Bind bind_rows([](pybind11::module_& m) {
  pybind11::call_guard<pybind11::gil_scoped_release> unlocked;
  m.def("gated", &gated, unlocked);
  m.def("add_norm", &add_norm, unlocked);
  m.def("norm_rope", &norm_rope, unlocked);
});

}  // namespace uni
