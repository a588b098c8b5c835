// Recurrent layers: fused cells, which torch calls on devices like this one, and a vendor's op for all steps at once.
//
// The vendor's ops are those of CUDA, under their names: `_cudnn_rnn` and `_cudnn_rnn_backward`. As there, dropout between
// layers comes from a state of its own, which a seed starts over and each call changes, and masks are in the reserved bytes.
#pragma once

#include <ATen/NativeFunctions.h>
#include <torch/csrc/autograd/autograd.h>

#include "norms.h"

namespace standin {

// ------------------------------------------------------------------------------------------------------ fused cells

at::Tensor biased(const at::Tensor& gates, const OptionalTensor& bias) {
  auto seen = alias_of(gates);
  return given(bias).defined() ? seen + alias_of(*bias) : seen.clone();
}

ThreeTensors lstm_cell(const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& cell,
                       const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  auto read = {from_input, from_hidden, cell, given(input_bias), given(hidden_bias)};
  auto made = as_kernel(from_input, "fused_lstm_cell", read, [&] {
    auto gates = biased(from_input, input_bias).add_(biased(from_hidden, hidden_bias));
    auto parts = gates.chunk(4, 1);  // input, forget, cell, output
    for (int i : {0, 1, 3}) parts[i].sigmoid_();
    parts[2].tanh_();
    auto next = (parts[1] * alias_of(cell)).addcmul_(parts[0], parts[2]);
    return std::vector<at::Tensor>{parts[3] * next.tanh(), next, gates};
  });
  return {made[0], made[1], made[2]};
}

ThreeTensors lstm_cell_backward(const OptionalTensor& to_hidden, const OptionalTensor& to_next, const at::Tensor& cell,
                                const at::Tensor& next, const at::Tensor& workspace, bool has_bias) {
  if (!given(to_hidden).defined() && !given(to_next).defined()) return {};
  auto read = {given(to_hidden), given(to_next), cell, next, workspace};
  auto made = as_kernel(cell, "fused_lstm_cell_backward", read, [&] {
    auto parts = alias_of(workspace).chunk(4, 1);
    auto tanh = alias_of(next).tanh();
    auto to_h = given(to_hidden).defined() ? alias_of(*to_hidden) : at::zeros_like(tanh);
    auto to_c = to_h * parts[3] * (1 - tanh * tanh);
    if (given(to_next).defined()) to_c.add_(alias_of(*to_next));
    auto slope = [](const at::Tensor& gate) { return gate * (1 - gate); };
    auto to_gates = at::cat({to_c * parts[2] * slope(parts[0]), to_c * alias_of(cell) * slope(parts[1]),
                             to_c * parts[0] * (1 - parts[2] * parts[2]), to_h * tanh * slope(parts[3])}, 1);
    return std::vector<at::Tensor>{to_gates, to_c * parts[1], has_bias ? to_gates.sum(0) : at::Tensor()};
  });
  return {made[0], made[1], made[2]};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& from_input, const at::Tensor& from_hidden,
                                            const at::Tensor& hidden, const OptionalTensor& input_bias,
                                            const OptionalTensor& hidden_bias) {
  auto read = {from_input, from_hidden, hidden, given(input_bias), given(hidden_bias)};
  auto made = as_kernel(from_input, "fused_gru_cell", read, [&] {
    auto in = biased(from_input, input_bias).chunk(3, 1), own = biased(from_hidden, hidden_bias).chunk(3, 1);
    auto reset = (in[0] + own[0]).sigmoid_(), update = (in[1] + own[1]).sigmoid_();
    auto fresh = at::addcmul(in[2], reset, own[2]).tanh_();
    auto seen = alias_of(hidden);
    return std::vector<at::Tensor>{fresh + update * (seen - fresh), at::cat({reset, update, fresh, seen, own[2]}, 1)};
  });
  return {made[0], made[1]};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& gradient,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
  auto made = as_kernel(gradient, "fused_gru_cell_backward", {gradient, workspace}, [&] {
    auto parts = alias_of(workspace).chunk(5, 1);  // reset, update, fresh, hidden, and the hidden state's share of fresh
    auto g = alias_of(gradient);
    auto to_fresh = g * (1 - parts[1]) * (1 - parts[2] * parts[2]);
    auto to_update = g * (parts[3] - parts[2]) * (1 - parts[1]) * parts[1];
    auto to_reset = to_fresh * parts[4] * (1 - parts[0]) * parts[0];
    auto to_in = at::cat({to_reset, to_update, to_fresh}, 1);
    auto to_own = at::cat({to_reset, to_update, to_fresh * parts[0]}, 1);
    auto sum = [&](const at::Tensor& t) { return has_bias ? t.sum(0) : at::Tensor(); };
    return std::vector<at::Tensor>{to_in, to_own, g * parts[1], sum(to_in), sum(to_own)};
  });
  return {made[0], made[1], made[2], made[3], made[4]};
}

// ------------------------------------------------------------------------------------------------- the vendor's op

bool vendor_recurrent = false;

enum Mode : int64_t { kRelu, kTanh, kLstm, kGru };

struct Recurrent {  // one call, without its tensors
  int64_t mode, stride, hidden, projected, layers;
  bool batch_first;
  double dropout;
  bool train, both_ways;
  std::vector<int64_t> batches;  // of each step of a packed sequence

  bool drops() const { return dropout > 0 && train; }
  std::vector<at::Tensor> run(const at::Tensor& input, const at::Tensor& hx, const at::Tensor& cx,
                              at::TensorList weights, uint64_t seed) const {  // by the CPU's kernels
    std::optional<OtherNumbers> numbers;
    if (drops()) numbers.emplace(Generator::mixed(seed, 0));
    const bool biases = stride >= 4;
    auto pair = [](std::tuple<at::Tensor, at::Tensor> made) {
      return std::vector<at::Tensor>{std::get<0>(made), std::get<1>(made)};
    };
    auto three = [](ThreeTensors made) {
      return std::vector<at::Tensor>{std::get<0>(made), std::get<1>(made), std::get<2>(made)};
    };
    if (batches.empty()) {
      if (mode == kLstm)
        return three(at::lstm(input, {hx, cx}, weights, biases, layers, dropout, train, both_ways, batch_first));
      auto* plain = mode == kGru ? &gru_all : mode == kTanh ? &tanh_all : &relu_all;
      return pair(plain(input, hx, weights, biases, layers, dropout, train, both_ways, batch_first));
    }
    auto sizes = at::tensor(batches, at::kLong);
    if (mode == kLstm) return three(at::lstm(input, sizes, {hx, cx}, weights, biases, layers, dropout, train, both_ways));
    auto* packed = mode == kGru ? &gru_packed : mode == kTanh ? &tanh_packed : &relu_packed;
    return pair(packed(input, sizes, hx, weights, biases, layers, dropout, train, both_ways));
  }

 private:
  using Two = std::tuple<at::Tensor, at::Tensor>;
#define EITHER(name, op)                                                                                               \
  static Two name##_all(const at::Tensor& x, const at::Tensor& h, at::TensorList w, bool b, int64_t n, double p,       \
                        bool t, bool d, bool f) {                                                                      \
    return at::op(x, h, w, b, n, p, t, d, f);                                                                          \
  }                                                                                                                    \
  static Two name##_packed(const at::Tensor& x, const at::Tensor& s, const at::Tensor& h, at::TensorList w, bool b,    \
                           int64_t n, double p, bool t, bool d) {                                                      \
    return at::op(x, s, h, w, b, n, p, t, d);                                                                          \
  }
  EITHER(gru, gru)
  EITHER(tanh, rnn_tanh)
  EITHER(relu, rnn_relu)
#undef EITHER
};

std::vector<at::Tensor> aliases_of(at::TensorList tensors) {
  std::vector<at::Tensor> seen;
  for (const auto& tensor : tensors) seen.push_back(tensor.defined() ? alias_of(tensor) : tensor);
  return seen;
}

std::vector<at::Tensor> rounded_otherwise(std::vector<at::Tensor> made) {
  for (auto& one : made) otherwise_rounded(one);
  return made;
}

uint64_t& word(const at::Tensor& bytes, int i = 0) { return static_cast<uint64_t*>(bytes.mutable_data_ptr())[i]; }

using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

FiveTensors recurrent(const at::Tensor& input, at::TensorList weights, int64_t stride, const OptionalTensor& flat,
                      const at::Tensor& hx, const OptionalTensor& cx, int64_t mode, c10::SymInt hidden,
                      c10::SymInt projected, int64_t layers, bool batch_first, double dropout, bool train,
                      bool both_ways, c10::SymIntArrayRef batches, const OptionalTensor& dropout_state) {
  Recurrent call{mode,  stride, hidden.expect_int(), projected.expect_int(), layers, batch_first, dropout, train,
                 both_ways, C10_AS_INTARRAYREF_SLOW(batches).vec()};
  std::vector<at::Tensor> read{input, hx, given(cx)};
  read.insert(read.end(), weights.begin(), weights.end());
  const auto seed = call.drops() ? word(*dropout_state) + 0x9E3779B97F4A7C15ull * ++word(*dropout_state, 1) : 0;
  auto made = as_kernel(input, "_cudnn_rnn", read, [&] {
    auto cell = mode == kLstm ? alias_of(*cx) : at::Tensor();
    auto all = rounded_otherwise(call.run(alias_of(input), alias_of(hx), cell, aliases_of(weights), seed));
    if (mode != kLstm) all.push_back(at::empty({0}, at::kFloat));
    for (auto& one : all) one = one.contiguous();
    const int64_t rows = call.batches.empty() ? input.size(0) * input.size(1) : input.size(0);
    const int64_t gates = mode == kLstm ? 6 : mode == kGru ? 5 : 2;
    const int64_t kept = rows * layers * (both_ways ? 2 : 1) * gates * call.hidden * input.itemsize() + 16;
    all.push_back(at::empty({train ? kept : 0}, at::kByte));
    if (train) word(all.back()) = seed;
    if (!given(flat).defined()) {
      std::vector<at::Tensor> parts;
      for (const auto& weight : weights) parts.push_back(alias_of(weight).flatten());
      all.push_back(at::cat(parts));
    }
    return all;
  });
  return {made[0], made[1], made[2], made[3], given(flat).defined() ? *flat : made[4]};
}

struct Differentiating {  // a kernel runs below autograd; this one differentiates
  c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
  c10::impl::ForceDispatchKeyGuard keys{now.included_, now.excluded_ - c10::autograd_dispatch_keyset -
                                                           DispatchKeySet(DispatchKey::ADInplaceOrView)};
  at::AutoGradMode on{true};
};

std::tuple<at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>> recurrent_backward(
    const at::Tensor& input, at::TensorList weights, int64_t stride, const at::Tensor&, const at::Tensor& hx,
    const OptionalTensor& cx, const at::Tensor&, const OptionalTensor& to_out, const OptionalTensor& to_hy,
    const OptionalTensor& to_cy, int64_t mode, c10::SymInt hidden, c10::SymInt projected, int64_t layers,
    bool batch_first, double dropout, bool train, bool both_ways, c10::SymIntArrayRef batches, const OptionalTensor&,
    const at::Tensor& reserve, std::array<bool, 4> wanted) {
  if (!given(to_out).defined() && !given(to_hy).defined() && !given(to_cy).defined())
    return {at::Tensor(), at::Tensor(), at::Tensor(), std::vector<at::Tensor>(weights.size())};
  TORCH_CHECK(train && reserve.numel(), "cudnn RNN backward can only be called in training mode");
  Recurrent call{mode,  stride, hidden.expect_int(), projected.expect_int(), layers, batch_first, dropout, train,
                 both_ways, C10_AS_INTARRAYREF_SLOW(batches).vec()};
  std::vector<at::Tensor> read{input, hx, given(cx), given(to_out), given(to_hy), given(to_cy), reserve};
  read.insert(read.end(), weights.begin(), weights.end());
  auto made = as_kernel(input, "_cudnn_rnn_backward", read, [&] {
    Differentiating now;
    std::vector<at::Tensor> leaves{alias_of(input), alias_of(hx)};
    if (mode == kLstm) leaves.push_back(alias_of(*cx));
    const auto first = leaves.size();
    for (auto& weight : aliases_of(weights)) leaves.push_back(weight);
    for (auto& leaf : leaves) leaf.requires_grad_();
    auto cell = mode == kLstm ? leaves[2] : at::Tensor();
    auto all = call.run(leaves[0], leaves[1], cell, at::TensorList(leaves).slice(first), word(reserve));
    std::vector<at::Tensor> roots, gradients;
    const at::Tensor given_ones[] = {given(to_out), given(to_hy), given(to_cy)};
    for (size_t i = 0; i < all.size(); ++i)
      if (given_ones[i].defined()) roots.push_back(all[i]), gradients.push_back(alias_of(given_ones[i]));
    auto found = torch::autograd::grad(roots, leaves, gradients, false, false, true);
    for (size_t i = 0; i < found.size(); ++i)
      found[i] = (found[i].defined() ? found[i] : at::zeros_like(leaves[i])).detach().contiguous();
    if (mode != kLstm) found.insert(found.begin() + 2, at::Tensor());
    return rounded_otherwise(found);
  });
  return {made[0], made[1], made[2], std::vector<at::Tensor>(made.begin() + 3, made.end())};
}

// ------------------------------------------------------------------------------- layers that choose the vendor's op

bool chooses_vendor() { return vendor_recurrent && at::globalContext().userEnabledCuDNN(); }

std::array<at::Tensor, kDevices>& dropout_states() {
  static auto* all = new std::array<at::Tensor, kDevices>;
  return *all;
}

at::Tensor dropout_state_of(const at::Tensor& input) {
  auto& state = dropout_states()[input.device().index()];
  auto* numbers = default_generator(input.device().index()).get<Generator>();
  const bool starts_over = std::exchange(numbers->was_set, false);
  if (!state.defined() || starts_over) {
    at::AutoDispatchBelowADInplaceOrView below;
    state = at::zeros({16}, input.options().dtype(at::kByte));
    word(state) = numbers->seed_;
  }
  return state;
}

at::Tensor flat_of(at::TensorList weights) {  // all weights as one tensor, where one storage has them side by side
  const auto& first = weights[0];
  int64_t next = first.storage_offset();
  for (const auto& weight : weights) {
    if (!weight.storage().is_alias_of(first.storage()) || weight.storage_offset() != next) return {};
    next += weight.numel();
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return at::empty({0}, first.options()).set_(first.storage(), first.storage_offset(), {next - first.storage_offset()}, {1});
}

FiveTensors by_vendor(const at::Tensor& input, at::TensorList weights, bool biases, const at::Tensor& hx,
                      const at::Tensor& cx, Mode mode, int64_t layers, double dropout, bool train, bool both_ways,
                      bool batch_first, at::IntArrayRef batches) {
  const bool projects = cx.defined() && cx.size(2) != hx.size(2);
  auto state = dropout > 0 && train ? OptionalTensor(dropout_state_of(input)) : std::nullopt;
  auto flat = flat_of(weights);
  return at::_cudnn_rnn(input, weights, (biases ? 4 : 2) + projects, flat.defined() ? OptionalTensor(flat) : std::nullopt,
                        hx, cx.defined() ? OptionalTensor(cx) : std::nullopt, mode,
                        projects ? cx.size(2) : hx.size(2), projects ? hx.size(2) : 0, layers, batch_first, dropout,
                        train, both_ways, batches, state);
}

std::vector<int64_t> numbers_of(const at::Tensor& sizes) {
  return {sizes.const_data_ptr<int64_t>(), sizes.const_data_ptr<int64_t>() + sizes.numel()};
}

ThreeTensors lstm(const at::Tensor& input, at::TensorList hx, at::TensorList weights, bool biases, int64_t layers,
                  double dropout, bool train, bool both_ways, bool batch_first) {
  if (!chooses_vendor()) return at::native::lstm(input, hx, weights, biases, layers, dropout, train, both_ways, batch_first);
  auto [out, hy, cy, _, __] = by_vendor(input, weights, biases, hx[0], hx[1], kLstm, layers, dropout, train, both_ways, batch_first, {});
  return {out, hy, cy};
}

ThreeTensors lstm_data(const at::Tensor& input, const at::Tensor& sizes, at::TensorList hx, at::TensorList weights,
                       bool biases, int64_t layers, double dropout, bool train, bool both_ways) {
  if (!chooses_vendor()) return at::native::lstm(input, sizes, hx, weights, biases, layers, dropout, train, both_ways);
  auto [out, hy, cy, _, __] = by_vendor(input, weights, biases, hx[0], hx[1], kLstm, layers, dropout, train, both_ways, false, numbers_of(sizes));
  return {out, hy, cy};
}

#define LAYER(op, mode)                                                                                                \
  std::tuple<at::Tensor, at::Tensor> op(const at::Tensor& input, const at::Tensor& hx, at::TensorList weights,         \
                                        bool biases, int64_t layers, double dropout, bool train, bool both_ways,       \
                                        bool batch_first) {                                                            \
    if (!chooses_vendor())                                                                                             \
      return at::native::op(input, hx, weights, biases, layers, dropout, train, both_ways, batch_first);               \
    auto made = by_vendor(input, weights, biases, hx, {}, mode, layers, dropout, train, both_ways, batch_first, {});   \
    return {std::get<0>(made), std::get<1>(made)};                                                                     \
  }                                                                                                                    \
  std::tuple<at::Tensor, at::Tensor> op##_data(const at::Tensor& input, const at::Tensor& sizes, const at::Tensor& hx, \
                                               at::TensorList weights, bool biases, int64_t layers, double dropout,    \
                                               bool train, bool both_ways) {                                           \
    if (!chooses_vendor())                                                                                             \
      return at::native::op(input, sizes, hx, weights, biases, layers, dropout, train, both_ways);                     \
    auto made = by_vendor(input, weights, biases, hx, {}, mode, layers, dropout, train, both_ways, false,              \
                          numbers_of(sizes));                                                                          \
    return {std::get<0>(made), std::get<1>(made)};                                                                     \
  }
LAYER(gru, kGru)
LAYER(rnn_tanh, kTanh)
LAYER(rnn_relu, kRelu)
#undef LAYER

void register_layers(torch::Library& m) {
  m.impl("lstm.input", TORCH_FN(lstm));
  m.impl("lstm.data", TORCH_FN(lstm_data));
  m.impl("gru.input", TORCH_FN(gru));
  m.impl("gru.data", TORCH_FN(gru_data));
  m.impl("rnn_tanh.input", TORCH_FN(rnn_tanh));
  m.impl("rnn_tanh.data", TORCH_FN(rnn_tanh_data));
  m.impl("rnn_relu.input", TORCH_FN(rnn_relu));
  m.impl("rnn_relu.data", TORCH_FN(rnn_relu_data));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  m.impl("_cudnn_rnn", TORCH_FN(recurrent));
  m.impl("_cudnn_rnn_backward", TORCH_FN(recurrent_backward));
  register_layers(m);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { register_layers(m); }

}  // namespace standin
