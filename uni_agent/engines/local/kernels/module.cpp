// The extension module: everything that the other files registered.
#include <vector>

#include "bind.h"

namespace uni {

static std::vector<void (*)(pybind11::module_&)>& registered() {
  static std::vector<void (*)(pybind11::module_&)> all;
  return all;
}

Bind::Bind(void (*define)(pybind11::module_&)) { registered().push_back(define); }

}  // namespace uni

PYBIND11_MODULE(uni_agent_native, m) {
  for (auto define : uni::registered()) define(m);
}
