// Attention in one op, as GPUs have it: scores are not kept, and dropout comes from a seed and an offset.
//
// Three of torch's ops by one kernel: `_scaled_dot_product_efficient_attention`, `_scaled_dot_product_flash_attention`
// (which returns integers too, and random state of its own form), and `_scaled_dot_product_fused_attention_overrideable`,
// which is what torch has for devices like this one.
#pragma once

#include <ATen/NativeFunctions.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>

#include "norms.h"

namespace standin {

bool efficient_attention = false, flash_attention = false, overrideable_attention = false;

struct Attention {  // one call: what is alike for all three ops
  at::Tensor query, key, value, bias;
  double p;
  bool causal;
  std::optional<double> scale;

  double factor() const { return scale.value_or(1.0 / std::sqrt(double(query.size(-1)))); }
  at::Tensor scores() const {  // on the CPU's aliases
    auto all = at::matmul(wide(query), wide(key).transpose(-2, -1)).mul_(factor());
    if (bias.defined()) all.add_(wide(bias));
    if (causal) all.masked_fill_(at::ones({query.size(-2), key.size(-2)}, at::kBool).tril_().logical_not_(), -INFINITY);
    return all;
  }
  static at::Tensor wide(const at::Tensor& tensor) { return alias_of(tensor).to(at::kFloat); }
  static at::Tensor laid_as(const at::Tensor& made, const at::Tensor& like) {
    return at::empty_like(alias_of(like)).copy_(made);
  }
};

at::Tensor by_rows(const at::Tensor& value, at::ScalarType type) {  // heads of a row beside each other
  return value.transpose(1, 2).to(type).contiguous().transpose(1, 2);
}

at::Tensor kept_of(const at::Tensor& like, double p, uint64_t seed, uint64_t offset) {
  auto numbers = at::detail::createCPUGenerator(Generator::mixed(seed, offset));
  return at::empty_like(like).bernoulli_(1 - p, numbers).div_(1 - p);
}

struct Attended {
  at::Tensor out, sums;  // sums: logsumexp of each row of scores
  uint64_t seed, offset;
};

Attended attend(const Attention& call, const char* name, bool rows_first) {
  auto* own = default_generator(call.query.device().index()).get<Generator>();
  if (call.p > 0) own->draw();
  const uint64_t seed = own->seed_, offset = own->offset_;
  auto made = as_kernel(call.query, name, {call.query, call.key, call.value, call.bias}, [&] {
    auto all = call.scores();
    auto sums = at::logsumexp(all, {-1});
    auto shares = all.sub_(sums.unsqueeze(-1)).exp_();
    if (call.p > 0) shares.mul_(kept_of(shares, call.p, seed, offset));
    auto out = at::matmul(shares, Attention::wide(call.value));
    return std::vector<at::Tensor>{
        rows_first ? by_rows(out, call.query.scalar_type()) : Attention::laid_as(out, call.query), sums};
  });
  return {made[0], made[1], seed, offset};
}

FourTensors attend_backward(const Attention& call, const char* name, const at::Tensor& gradient, const at::Tensor& sums,
                            uint64_t seed, uint64_t offset, bool to_bias, bool rows_first) {
  auto made = as_kernel(call.query, name, {gradient, call.query, call.key, call.value, call.bias, sums}, [&] {
    auto q = Attention::wide(call.query), k = Attention::wide(call.key), v = Attention::wide(call.value);
    auto g = Attention::wide(gradient);
    auto shares = call.scores().sub_(alias_of(sums).narrow(2, 0, call.query.size(2)).unsqueeze(-1)).exp_();
    auto to_shares = at::matmul(g, v.transpose(-2, -1));
    auto dropped = shares;
    if (call.p > 0) {
      auto kept = kept_of(shares, call.p, seed, offset);
      dropped = shares * kept;
      to_shares.mul_(kept);
    }
    auto to_value = at::matmul(dropped.transpose(-2, -1), g);
    auto to_scores = shares.mul(to_shares - (to_shares * shares).sum(-1, true));
    auto to_query = at::matmul(to_scores, k).mul_(call.factor());
    auto to_key = at::matmul(to_scores.transpose(-2, -1), q).mul_(call.factor());
    auto type = call.query.scalar_type();
    auto laid = [&](const at::Tensor& made, const at::Tensor& like) {
      return rows_first ? by_rows(made, type) : Attention::laid_as(made, like);
    };
    return std::vector<at::Tensor>{laid(to_query, call.query), laid(to_key, call.key), laid(to_value, call.value),
                                   to_bias ? to_scores.sum_to_size(call.bias.sizes()).to(type) : at::Tensor()};
  });
  return {made[0], made[1], made[2], made[3]};
}

at::Tensor number(uint64_t n, Device place = at::kCPU) {
  return at::scalar_tensor(int64_t(n), at::device(place).dtype(at::kLong));
}

FourTensors efficient(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const OptionalTensor& bias, bool keeps_sums, double p, bool causal, std::optional<double> scale) {
  auto made = attend({query, key, value, given(bias), p, causal, scale}, "efficient_attention", true);
  const int64_t rows = query.size(2), width = keeps_sums ? (rows + 31) / 32 * 32 : 0;
  auto sums = at::full({query.size(0), query.size(1), width}, INFINITY, made.sums.options());
  if (keeps_sums) sums.narrow(2, 0, rows).copy_(made.sums);
  return {made.out, sums, number(made.seed), number(made.offset)};
}

FourTensors efficient_backward(const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& bias, const at::Tensor&,
                               const at::Tensor& sums, const at::Tensor& seed, const at::Tensor& offset, double p,
                               std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  return attend_backward({query, key, value, bias, p, causal, scale}, "efficient_attention_backward", gradient, sums,
                         seed.item<int64_t>(), offset.item<int64_t>(), bias.defined() && wanted[3], true);
}

using Fused = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
                         at::Tensor, at::Tensor>;

Fused flash(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double p, bool causal, bool,
            std::optional<double> scale) {
  auto made = attend({query, key, value, {}, p, causal, scale}, "flash_attention", false);
  auto state = as_kernel(query, "flash_attention", {}, [&] {
    auto numbers = at::empty({2}, at::kLong);
    numbers.mutable_data_ptr<int64_t>()[0] = int64_t(made.seed);
    numbers.mutable_data_ptr<int64_t>()[1] = int64_t(made.offset);
    return std::vector<at::Tensor>{numbers.view(at::kUInt64), at::empty({}, at::kUInt64)};
  });
  return {made.out, made.sums, {}, {}, query.size(2), key.size(2), state[0], state[1], at::empty({0}, query.options())};
}

ThreeTensors flash_backward(const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const at::Tensor&, const at::Tensor& sums, const at::Tensor&,
                            const at::Tensor&, c10::SymInt, c10::SymInt, double p, bool causal, const at::Tensor& state,
                            const at::Tensor&, std::optional<double> scale) {
  const auto* numbers = static_cast<const uint64_t*>(state.const_data_ptr());
  auto made = attend_backward({query, key, value, {}, p, causal, scale}, "flash_attention_backward", gradient, sums,
                              numbers[0], numbers[1], false, false);
  return {std::get<0>(made), std::get<1>(made), std::get<2>(made)};
}

Fused overrideable(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& bias,
                   double p, bool causal, bool, std::optional<double> scale) {
  auto made = attend({query, key, value, given(bias), p, causal, scale}, "overrideable_attention", false);
  const auto place = query.device();
  const auto seed = number(made.seed, place), offset = number(made.offset, place);
  return {made.out, made.sums, {}, {}, query.size(2), key.size(2), seed, offset, {}};
}

FourTensors overrideable_backward(const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const at::Tensor& bias, std::array<bool, 4> wanted,
                                  const at::Tensor&, const at::Tensor& sums, const at::Tensor&, const at::Tensor&,
                                  c10::SymInt, c10::SymInt, double p, bool causal, const at::Tensor& seed,
                                  const at::Tensor& offset, std::optional<double> scale) {
  return attend_backward({query, key, value, bias, p, causal, scale}, "overrideable_attention_backward", gradient, sums,
                         seed.item<int64_t>(), offset.item<int64_t>(), bias.defined() && wanted[3], false);
}

int64_t attention_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&, double, bool,
                         std::optional<double>, bool gqa) {
  const auto& user = at::globalContext();
  if (overrideable_attention && !gqa && user.userEnabledOverrideableSDP()) return int64_t(at::SDPBackend::overrideable);
  if (efficient_attention && !gqa && user.userEnabledMemEfficientSDP()) return int64_t(at::SDPBackend::efficient_attention);
  return int64_t(at::SDPBackend::math);
}

// Torch calls its flash op on CUDA alone, which takes halves without a mask, their last sizes multiples of 8.
at::Tensor any_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const OptionalTensor& bias, double p, bool causal, std::optional<double> scale, bool gqa) {
  const bool usable = flash_attention && at::globalContext().userEnabledFlashSDP() && is_half(query) &&
                      query.dim() == 4 && !given(bias).defined() && query.size(1) == key.size(1);
  if (!usable) return at::native::scaled_dot_product_attention(query, key, value, bias, p, causal, scale, gqa);
  const auto width = query.size(-1), missing = (8 - width % 8) % 8;
  auto padded = [&](const at::Tensor& t) { return missing ? at::pad(t, {0, missing}) : t; };
  auto made = at::_scaled_dot_product_flash_attention(padded(query), padded(key), padded(value), p, causal, false,
                                                      scale.value_or(1.0 / std::sqrt(double(width))));
  return missing ? std::get<0>(made).slice(-1, 0, width) : std::get<0>(made);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", TORCH_FN(attention_choice));
  m.impl("scaled_dot_product_attention", TORCH_FN(any_attention));
  m.impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
  m.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
  m.impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  m.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(overrideable));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(overrideable_backward));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("scaled_dot_product_attention", TORCH_FN(any_attention)); }

}  // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::attention_choice)
}
