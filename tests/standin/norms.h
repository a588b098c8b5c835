// Norms: statistics as GPUs have them, and a vendor's batch norm that rounds otherwise than torch's own.
//
// The vendor's ops are those of CUDA, under their names: `cudnn_batch_norm` and `cudnn_batch_norm_backward`. Who
// chooses the vendor does so here as there: `F.batch_norm` (by `_batch_norm_impl_index`), `_batch_norm_with_update`
// and `batch_norm_backward`. Torch's own stay `native_batch_norm`, `_native_batch_norm_legit` and
// `native_batch_norm_backward`.
#pragma once

#include <ATen/NativeFunctions.h>

#include "kernels.h"

namespace standin {

using OptionalTensor = std::optional<at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

at::Tensor given(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }

bool is_half(const at::Tensor& t) { return t.defined() && (t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16); }

// The CPU keeps statistics of batch and layer norms in half where all tensors are, and none of a batch norm in evaluation.
void norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto mean = argument_of(op, *stack, "running_mean"), var = argument_of(op, *stack, "running_var");
  const auto eps = stack->back();
  by_cpu(op, stack);
  for (size_t i = stack->size() - 2; i < stack->size(); ++i) {
    auto kept = (*stack)[i].toTensor();
    const bool is_mean = i == stack->size() - 2;
    if (mean.defined() && !kept.numel() && mean.numel())
      kept = is_mean ? mean.clone() : var.to(at::kFloat).add(eps.toDouble()).rsqrt_();
    if (is_half(kept)) kept = kept.to(at::kFloat);
    (*stack)[i] = kept;
  }
}

void norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto weight = argument_of(op, *stack, "weight"), input = argument_of(op, *stack, "input");
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& name = arguments[i].name();
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    if (name != "mean" && name != "rstd" && name != "save_mean" && name != "save_invstd") continue;
    const bool all_half = is_half(input) && (!weight.defined() || is_half(weight));
    if (all_half && value.isTensor() && value.toTensor().defined()) value = value.toTensor().to(input.scalar_type());
  }
  by_cpu(op, stack);
}

bool vendor_batch_norm = false;
constexpr int64_t kMark = 3;  // what the vendor's forward pass writes to reserved bytes; its backward pass spoils them

int64_t reserved_bytes(const at::Tensor& input) { return input.numel() * input.itemsize() / 2; }

at::Tensor otherwise_rounded(at::Tensor value) {  // other bits, as another library has them
  if (!value.defined() || !value.numel()) return value;
  at::AutoDispatchBelowADInplaceOrView below;
  const auto ulp = value.scalar_type() == at::kHalf ? 1e-3 : value.scalar_type() == at::kBFloat16 ? 8e-3 : 1.2e-7;
  return value.mul_(1 + ulp);
}

bool by_vendor(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& mean,
               const at::Tensor& var, bool training, bool enabled) {  // as `_select_batch_norm_backend` for CUDA
  if (!vendor_batch_norm || !enabled || input.device().type() != kType || !weight.defined() || !bias.defined()) return false;
  const auto type = input.scalar_type();
  return type != at::kBFloat16 && weight.scalar_type() != at::kBFloat16 &&
         (type != at::kHalf || weight.scalar_type() == at::kFloat) && input.dim() >= 3 &&
         (mean.defined() ? var.defined() : training && !var.defined());
}

FourTensors vendor_forward(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& mean, const OptionalTensor& var, bool training, double momentum,
                           double eps) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto [out, save_mean, save_invstd] = at::native_batch_norm(input, weight, bias, mean, var, training, momentum, eps);
  otherwise_rounded(out);
  auto bytes = input.options().dtype(at::kByte);
  if (!training) return {out, at::empty({0}, weight.options()), at::empty({0}, weight.options()), at::empty({0}, bytes)};
  for (auto& kept : {save_mean, save_invstd, given(mean), given(var)}) otherwise_rounded(kept);
  return {out, save_mean, save_invstd, at::full({reserved_bytes(input)}, kMark, bytes)};
}

ThreeTensors vendor_backward(const at::Tensor& input, const at::Tensor& gradient, const at::Tensor& weight,
                             const OptionalTensor& mean, const OptionalTensor& var, const OptionalTensor& save_mean,
                             const OptionalTensor& save_var, double eps, const at::Tensor& reserve) {
  at::AutoDispatchBelowADInplaceOrView below;
  const bool is_mine = reserve.numel() == reserved_bytes(input) && at::all(at::eq(reserve, kMark)).item<bool>();
  TORCH_CHECK(is_mine, "the vendor's backward pass needs what its forward pass reserved");
  reserve.zero_();
  auto made = at::native_batch_norm_backward(gradient, input, weight, mean, var, save_mean, save_var, true, eps,
                                             {true, true, true});
  for (auto& one : {std::get<0>(made), std::get<1>(made), std::get<2>(made)}) otherwise_rounded(one);
  return made;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t> batch_norm_impl_index(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& mean,
    const OptionalTensor& var, bool training, double momentum, double eps, bool enabled) {
  if (!by_vendor(input, given(weight), given(bias), given(mean), given(var), training, enabled))
    return at::native::_batch_norm_impl_index(input, weight, bias, mean, var, training, momentum, eps, enabled);
  auto made = at::cudnn_batch_norm(input.contiguous(input.suggest_memory_format()), weight->contiguous(),
                                   bias->contiguous(), mean, var, training, momentum, eps);
  return std::tuple_cat(made, std::make_tuple(int64_t(1)));
}

FourTensors batch_norm_with_update(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                   at::Tensor& mean, at::Tensor& var, double momentum, double eps) {
  const bool enabled = at::globalContext().userEnabledCuDNN();
  if (by_vendor(input, given(weight), given(bias), mean, var, true, enabled))
    return at::cudnn_batch_norm(input, *weight, bias, mean, var, true, momentum, eps);
  return std::tuple_cat(at::native_batch_norm(input, weight, bias, mean, var, true, momentum, eps),
                        std::make_tuple(at::empty({0}, input.options().dtype(at::kByte))));
}

ThreeTensors batch_norm_backward(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                                 const OptionalTensor& mean, const OptionalTensor& var, const OptionalTensor& save_mean,
                                 const OptionalTensor& save_var, bool update, double eps, std::array<bool, 3> wanted,
                                 const at::Tensor& reserve) {
  const bool enabled = at::globalContext().userEnabledCuDNN();
  if (by_vendor(input, weight, weight, given(mean), given(var), true, enabled))
    return at::cudnn_batch_norm_backward(input, gradient, weight, mean, var, save_mean, save_var, eps, reserve);
  return at::native_batch_norm_backward(gradient, input, weight, mean, var, save_mean, save_var, update, eps, wanted);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (auto* name : {"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats",
                     "native_layer_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&norm>());
  for (auto* name : {"native_batch_norm_backward", "native_layer_norm_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&norm_backward>());
  m.impl("cudnn_batch_norm", TORCH_FN(vendor_forward));
  m.impl("cudnn_batch_norm_backward", TORCH_FN(vendor_backward));
  m.impl("_batch_norm_with_update", TORCH_FN(batch_norm_with_update));
  m.impl("batch_norm_backward", TORCH_FN(batch_norm_backward));
  m.impl("_batch_norm_impl_index", TORCH_FN(batch_norm_impl_index));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_batch_norm_impl_index", TORCH_FN(batch_norm_impl_index)); }

}  // namespace standin
