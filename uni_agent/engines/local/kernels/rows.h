// Row-wise steps of a decoder: what a row becomes does not depend on the rows beside it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace uni {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// [N, 2I], gate then up -> [N, I]: act(gate) * up, with SiLU or the tanh form of GELU.
Tensor gated(const Tensor& gate_up, bool gelu);

// x += added (of which the RMS norm under `post` is taken first, where given); returns the RMS norm of x
// under `weight`. x and added [N, H], changed in place; weights float32[H].
Tensor add_norm(Tensor x, const MaybeTensor& added, const MaybeTensor& post, const Tensor& weight, double eps);

// RMS norm per head (where weights float32[D] are given), then rotary, in place on the q and k heads of
// qkv [N, (Hq + 2 Hk) * D]. cos and sin float32[T, D], int64[N] positions below T.
void norm_rope(Tensor qkv, const MaybeTensor& q_norm, const MaybeTensor& k_norm, const Tensor& cos,
               const Tensor& sin, const Tensor& positions, int64_t heads, int64_t kv_heads, double eps);

}  // namespace uni
