// An accelerator for tests on machines without one: "standin", made of host memory and CPU kernels.
//
// - `streams.h`: streams and events, with a race detector
// - `memory.h`: the device's memory behind a caching allocator, and pinned memory
// - `random.h`: generators
// - `kernels.h`: ops by CPU kernels on the device's bytes
// - `tensors.h`: tensors made, copied and resized; convolutions
// - `norms.h`, `attention.h`, `recurrent.h`: ops of which GPUs have their own
// - `autocast.h`: autocast with CUDA's lists
// - `collectives.h`: a c10d backend over gloo
// - `guard.h`: current devices, streams and events for torch
//
// Kernels run without the device's lock: they may need Python's own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "attention.h"
#include "autocast.h"
#include "collectives.h"
#include "guard.h"
#include "recurrent.h"
#include "tensors.h"

namespace standin {

bool gives_default = false;  // how Python gets at the default generators

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex i) const override { Guard().setDevice(Device(kType, i)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return Guard().exchangeDevice(Device(kType, i)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return i < 0 ? current_device : exchangeDevice(i); }
  bool isPinnedPtr(const void* p) const override { return pinned_arena().has(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  Device getDeviceFromPtr(void* p) const override {
    Lock lock(mutex);
    TORCH_CHECK(arena().has(p), "not a pointer of the device");
    auto found = blocks().find(p);
    return Device(kType, found == blocks().end() ? current_device : found->second->device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    return gives_default ? default_generator(i) : at::make_generator<Generator>(i < 0 ? current_device : i);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* own = storage.unsafeGetStorageImpl();
    OnDevice on(own->device().index());
    auto fresh = allocator().allocate(size);
    std::memcpy(fresh.get(), own->data(), std::min(size, own->nbytes()));
    own->set_data_ptr_noswap(std::move(fresh));
    own->set_nbytes(size);
  }
};

}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace standin;
  plain_cpu = c10::GetAllocator(c10::kCPU);
  c10::SetAllocator(c10::kCPU, new CpuAllocator, 200);
  c10::SetAllocator(kType, &allocator(), 200);
  at::setHostAllocator(kType, &host_allocator(), 200);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  prefer_cpu_kernels();
  m.def("set_capacity", [](int device, std::optional<size_t> bytes) {
    Lock lock(mutex);
    memories().at(device).capacity = bytes.value_or(SIZE_MAX);
  });
  m.def("set_lazy", [](bool on) {
    for (DeviceIndex i = 0; i < kDevices; ++i) synchronize(i);
    lazy = on;
  });
  m.def("set_efficient_attention", [](bool on) { efficient_attention = on; });
  m.def("set_flash_attention", [](bool on) { flash_attention = on; });
  m.def("set_overrideable_attention", [](bool on) { overrideable_attention = on; });
  m.def("set_vendor_batch_norm", [](bool on) { vendor_batch_norm = on; });
  m.def("batch_norm_by_vendor", [](const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                   const OptionalTensor& mean, const OptionalTensor& var, bool training) {
    const bool enabled = at::globalContext().userEnabledCuDNN();
    return by_vendor(input, given(weight), given(bias), given(mean), given(var), training, enabled);
  });
  m.def("batch_norm_reserved", &reserved_bytes);
  pybind11::module_::import("torch._C._distributed_c10d");
  pybind11::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
      .def(pybind11::init<c10::intrusive_ptr<c10d::Backend>>());
  m.def("convolution_format", &convolution_format);
  m.def("has_vendor_recurrent", &chooses_vendor);
  m.def("set_vendor_recurrent", [](bool on) {
    vendor_recurrent = on;
    for (auto& state : dropout_states()) state.reset();
  });
  m.def("set_matmul_workspace", [](size_t bytes) {
    Lock lock(mutex);
    workspaces().clear();
    workspace_bytes = bytes;
  });
  m.def("sleep", [](double seconds) {
    Lock lock(mutex);
    auto& own = lines[line_now()];
    own.free_at = time_of(line_now()) + std::chrono::duration_cast<Time>(std::chrono::duration<double>(seconds));
  });
  m.def("take_races", [] {
    Lock lock(mutex);
    return std::exchange(races, {});
  });
  m.def("num_ops", [] { return num_ops; });
  m.def("set_gives_default", [](bool on) { gives_default = on; });
  m.def("device_count", [] { return kDevices; });
}
