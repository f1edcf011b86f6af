// How a source file of this folder offers functions to Python: a static `Bind` at its end.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

namespace uni {

// static uni::Bind bind_file([](pybind11::module_& m) { m.def("name", &function); });
struct Bind {
  explicit Bind(void (*define)(pybind11::module_&));
};

}  // namespace uni
