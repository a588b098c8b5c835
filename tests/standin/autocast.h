// Autocast with CUDA's lists of ops.
#pragma once

#include "kernels.h"

namespace standin {

enum class Policy { lower, wide, wide_result, widest };

template <Policy policy>
void cast(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  auto eligible = [](const at::Tensor& t) { return at::autocast::is_eligible(t, kType); };
  auto to = at::kFloat;
  if (policy == Policy::lower) to = at::autocast::get_autocast_dtype(kType);
  if (policy == Policy::widest) {
    to = at::autocast::get_autocast_dtype(kType);
    for (size_t i = 0; i < arguments.size(); ++i)
      mapped((*stack)[begin + i], [&](const at::Tensor& t) {
        if (eligible(t) && t.scalar_type() == at::kFloat) to = at::kFloat;
        return t;
      });
  }
  if (policy == Policy::wide_result) {
    const auto& first = (*stack)[begin];
    for (size_t i = 0; i < arguments.size() && first.isTensor() && eligible(first.toTensor()); ++i)
      if (arguments[i].name() == "dtype" && (*stack)[begin + i].isNone()) (*stack)[begin + i] = at::kFloat;
  } else {
    for (size_t i = 0; i < arguments.size(); ++i)
      (*stack)[begin + i] = mapped((*stack)[begin + i], [&](const at::Tensor& t) {
        return t.defined() ? at::autocast::cached_cast(to, t, kType) : t;
      });
  }
  op.callBoxed(stack);
}

template <Policy policy>
torch::CppFunction casting() {
  return torch::CppFunction::makeFromBoxedFunction<&cast<policy>>();
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define NAMED_1(op) #op
#define NAMED_2(op, overload) #op "." #overload
#define NAMED_OF(_1, _2, which, ...) which
#define NAMED(...) NAMED_OF(__VA_ARGS__, NAMED_2, NAMED_1, _)(__VA_ARGS__)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) m.impl(NAMED(__VA_ARGS__), casting<Policy::lower>());
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define WIDE(...) m.impl(NAMED(__VA_ARGS__), casting<Policy::wide>());
  AT_FORALL_FP32(WIDE)
#define WIDE_RESULT(...) m.impl(NAMED(__VA_ARGS__), casting<Policy::wide_result>());
  AT_FORALL_FP32_SET_OPT_DTYPE(WIDE_RESULT)
#define WIDEST(...) m.impl(NAMED(__VA_ARGS__), casting<Policy::widest>());
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace standin
