// Random numbers: a generator (seed, offset), whose state has 16 bytes, as on CUDA.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include "memory.h"

namespace standin {

using c10::DispatchKey;
using c10::DispatchKeySet;

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex i) : GeneratorImpl(Device(kType, i), DispatchKeySet(DispatchKey::PrivateUse1)) {}
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  bool was_set = true;  // since a recurrent layer drew its dropout last, whose own state then starts over, as on CUDA
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0, was_set = true; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.itemsize() == 1, "RNG state is wrong size");
    auto* p = static_cast<const uint64_t*>(state.data());
    seed_ = p[0], offset_ = p[1], was_set = true;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* p = static_cast<uint64_t*>(state.mutable_data_ptr());
    p[0] = seed_, p[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* other = new Generator(device_.index());
    other->seed_ = seed_, other->offset_ = offset_;
    return other;
  }
  uint32_t draw() {  // a seed for the numbers of one op
    std::lock_guard<std::mutex> lock(mutex_);
    offset_ += 4;
    return mixed(seed_, offset_);
  }
  static uint32_t mixed(uint64_t seed, uint64_t offset) {
    uint64_t z = seed + offset * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<uint32_t>(z ^ (z >> 31));
  }
};

const at::Generator& default_generator(DeviceIndex i) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all->at(i < 0 ? current_device : i);
}



}  // namespace standin
