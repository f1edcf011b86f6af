// A decoder layer in two calls, with the attention between them left to the caller.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linear.h>
#include <c10/core/InferenceMode.h>

#include <tuple>
#include <vector>

#include "bind.h"
#include "rows.h"

namespace uni {

struct Linear {
  Tensor weight;
  MaybeTensor bias;
  bool packed;
  int64_t tile;  // rows of one call, or 0

  Tensor one(const Tensor& x) const {
    if (!packed) return at::linear(x, weight, bias);
    using Pointwise = Tensor(const Tensor&, const Tensor&, const MaybeTensor&, std::string_view,
                             c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                               .typed<Pointwise>();
    static const c10::List<std::optional<at::Scalar>> none;
    return op.call(x, weight, bias, "none", none, "");
  }

  Tensor operator()(const Tensor& x) const {
    if (!tile) return one(x);
    int64_t rows = x.size(0), missing = (tile - rows % tile) % tile;
    Tensor full = missing ? at::constant_pad_nd(x, {0, 0, 0, missing}) : x;
    std::vector<Tensor> parts;
    for (int64_t i = 0; i < rows; i += tile) parts.push_back(one(full.narrow(0, i, tile)));
    Tensor out = parts.size() == 1 ? parts[0] : at::cat(parts);
    return missing ? out.narrow(0, 0, rows).contiguous() : out;
  }
};

using WeightAndBias = std::tuple<Tensor, MaybeTensor>;

struct Layer {
  Linear qkv, out, gate_up, down;
  MaybeTensor before, attention_post, q_norm, k_norm;
  Tensor input, mlp, cos, sin;
  int64_t heads, kv_heads;
  double eps;
  bool gelu;

  // linears: qkv, out, gate and up, down. norms: that of the previous MLP's output, of the layer's input,
  // of q, of k, of attention's output, of the MLP's input; all but the second and the last may be absent.
  Layer(const std::vector<WeightAndBias>& linears, const std::vector<MaybeTensor>& norms, Tensor cos,
        Tensor sin, int64_t heads, int64_t kv_heads, double eps, bool gelu, bool packed, int64_t tile)
      : before(norms.at(0)), attention_post(norms.at(4)), q_norm(norms.at(2)), k_norm(norms.at(3)),
        input(norms.at(1).value()), mlp(norms.at(5).value()), cos(cos), sin(sin), heads(heads),
        kv_heads(kv_heads), eps(eps), gelu(gelu) {
    Linear* all[] = {&qkv, &out, &gate_up, &down};
    for (int i = 0; i < 4; i++) {
      *all[i] = Linear{std::get<0>(linears.at(i)), std::get<1>(linears.at(i)), packed, tile};
    }
  }

  // x += added, then norm, q, k, v, their norms and rotary: q [N, Hq, D], k and v [N, Hk, D], views of one
  // buffer.
  std::tuple<Tensor, Tensor, Tensor> start(const Tensor& x, const MaybeTensor& added,
                                           const Tensor& positions) const {
    c10::InferenceMode guard;
    Tensor all = qkv(add_norm(x, added, before, input, eps));
    norm_rope(all, q_norm, k_norm, cos, sin, positions, heads, kv_heads, eps);
    all = all.view({x.size(0), heads + 2 * kv_heads, cos.size(1)});
    return {all.narrow(1, 0, heads), all.narrow(1, heads, kv_heads),
            all.narrow(1, heads + kv_heads, kv_heads)};
  }

  // x += attention's output [N, Hq, D] through its projection; returns what the MLP would add to x.
  Tensor finish(const Tensor& x, const Tensor& mixed) const {
    c10::InferenceMode guard;
    Tensor projected = out(mixed.reshape({x.size(0), heads * cos.size(1)}));
    Tensor inner = add_norm(x, projected, attention_post, mlp, eps);
    return down(gated(gate_up(inner), gelu));
  }
};

static Bind bind_dense([](pybind11::module_& m) {
  namespace py = pybind11;
  py::call_guard<py::gil_scoped_release> unlocked;
  py::class_<Layer>(m, "Layer")
      .def(py::init<const std::vector<WeightAndBias>&, const std::vector<MaybeTensor>&, Tensor, Tensor,
                    int64_t, int64_t, double, bool, bool, int64_t>())
      .def("start", &Layer::start, unlocked)
      .def("finish", &Layer::finish, unlocked);
});

}  // namespace uni
