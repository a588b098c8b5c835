// Ops by CPU kernels on tensors that alias the device's bytes.
// 
// What a kernel allocates meanwhile, results and temporaries, comes from the device's memory, and so is counted as on a GPU.
#pragma once

#include <thread>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "random.h"

namespace standin {

using c10::StorageImpl;

at::Tensor over(c10::Storage storage, DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made.unsafeGetTensorImpl()->_set_conj(true);
  if (like.is_neg()) made.unsafeGetTensorImpl()->_set_neg(true);
  return made;
}

c10::Storage over_bytes(StorageImpl* bytes) {  // a CPU storage of the same bytes, which are not its own
  auto* p = bytes->mutable_data();
  return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), bytes->nbytes(), DataPtr(p, c10::kCPU),
                                          c10::GetAllocator(c10::kCPU), true);
}

at::Tensor alias_of(const at::Tensor& tensor) {
  return over(over_bytes(tensor.storage().unsafeGetStorageImpl()), DispatchKey::CPU, tensor);
}

c10::Storage moved(StorageImpl* from, Device device) {  // what a kernel allocated becomes the device's
  size_t n = from->nbytes();
  DataPtr bytes;
  if (n && !arena().has(from->data())) {
    bytes = allocator().allocate(n);
    std::memcpy(bytes.get(), from->data(), n);
  } else {
    bytes = from->set_data_ptr(DataPtr(nullptr, c10::kCPU));
  }
  bytes.unsafe_set_device(device);
  return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), n, std::move(bytes), &allocator(), true);
}

const std::unordered_set<std::string> kMixed = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                                "aten::_unsafe_index", "aten::_pack_padded_sequence",
                                                "aten::_unsafe_index_put", "aten::index_put"};
const std::unordered_set<std::string> kSynchronous = {"aten::nonzero", "aten::masked_select", "aten::_unique2",
                                                      "aten::unique_dim", "aten::unique_consecutive", "aten::_unique"};
uint64_t num_ops = 0;

// What torch keeps for cuBLAS of every thread that multiplies matrices: made at the first product, and never freed.
const std::unordered_set<std::string> kProducts = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
size_t workspace_bytes = 0;
std::map<std::pair<std::thread::id, int>, DataPtr>& workspaces() {
  static auto* all = new std::map<std::pair<std::thread::id, int>, DataPtr>;
  return *all;
}

void keep_workspace(int line) {
  Lock lock(mutex);
  auto& own = workspaces()[{std::this_thread::get_id(), line}];
  if (!own) own = allocator().allocate(workspace_bytes);
}

struct Call {  // the tensors of one call, as the device has them and as the CPU sees them
  Device device{kType, current_device};
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  std::vector<at::Tensor> strangers;
  std::unordered_map<StorageImpl*, c10::Storage> on_cpu, on_device;
  bool found = false;

  void meet(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kType || found) return;
    found = true;
    device = tensor.device();
  }
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kType) {
      strangers.push_back(tensor);
      return tensor;
    }
    TORCH_CHECK(tensor.device() == device, "Expected all tensors to be on the same device, but found at least two "
                "devices, ", device, " and ", tensor.device(), "!");
    for (auto& [own, seen] : pairs)
      if (own.is_same(tensor)) return seen;
    auto* bytes = tensor.storage().unsafeGetStorageImpl();
    auto known = on_cpu.find(bytes);
    if (known == on_cpu.end()) {
      known = on_cpu.emplace(bytes, over_bytes(bytes)).first;
      on_device.emplace(known->second.unsafeGetStorageImpl(), tensor.storage());
    }
    pairs.emplace_back(tensor, over(known->second, DispatchKey::CPU, tensor));
    return pairs.back().second;
  }
  at::Tensor to_device(const at::Tensor& tensor, int line, const std::string& op) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto& [own, seen] : pairs)
      if (seen.is_same(tensor)) return own;
    for (auto& stranger : strangers)
      if (stranger.is_same(tensor)) return tensor;
    auto* bytes = tensor.storage().unsafeGetStorageImpl();
    auto known = on_device.find(bytes);
    if (known == on_device.end()) {
      known = on_device.emplace(bytes, moved(bytes, device)).first;
      touch(known->second.data(), true, line, op);
    }
    return over(known->second, DispatchKey::PrivateUse1, tensor);
  }
  void follow_resizes() {
    for (auto& [bytes, storage] : on_cpu) {
      auto* seen = storage.unsafeGetStorageImpl();
      if (seen->data() == bytes->data() && seen->nbytes() == bytes->nbytes()) continue;
      if (seen->data() != bytes->data()) {
        auto fresh = seen->set_data_ptr(DataPtr(nullptr, c10::kCPU));
        fresh.unsafe_set_device(device);
        bytes->set_data_ptr_noswap(std::move(fresh));
      }
      bytes->set_nbytes(seen->nbytes());
    }
    for (auto& [own, seen] : pairs)
      if (own.sizes() != seen.sizes() || own.strides() != seen.strides() || own.storage_offset() != seen.storage_offset())
        own.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
  }
};

template <class F>
c10::IValue mapped(const c10::IValue& value, F f) {  // tensors in a value, replaced
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(f(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(f(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

struct OtherNumbers {  // the CPU's default generator gives those of the device, for a while
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  at::Tensor kept;
  explicit OtherNumbers(uint32_t seed) : kept(at::Tensor(cpu.unsafeGetGeneratorImpl()->get_state())) {
    cpu.set_current_seed(seed);
  }
  ~OtherNumbers() { cpu.unsafeGetGeneratorImpl()->set_state(*kept.unsafeGetTensorImpl()); }
};

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  Call call;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isDevice() && value.toDevice().type() == kType && !call.found)
      call.device = Device(kType, value.toDevice().has_index() ? value.toDevice().index() : current_device);
    mapped(value, [&](const at::Tensor& tensor) { return call.meet(tensor), tensor; });
  }
  OnDevice on(call.device.index());
  const int line = line_now();
  if (workspace_bytes && kProducts.count(name)) keep_workspace(line);
  std::unique_lock<std::recursive_mutex> lock(mutex);
  ++num_ops;
  begin_op(line);
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    const auto& argument = schema.arguments()[i];
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isDevice() && value.toDevice().type() == kType) value = c10::IValue(Device(c10::kCPU));
    if (argument.name() == "generator" && draws) {
      auto own = value.isNone() ? default_generator(call.device.index()) : value.toGenerator();
      TORCH_CHECK(own.device().type() == kType, "Expected a 'standin' device type for generator but found '",
                  own.device().type(), "'");
      value = c10::IValue(at::detail::createCPUGenerator(own.get<Generator>()->draw()));
      draws = false;
    }
    value = mapped(value, [&](const at::Tensor& tensor) {
      auto seen = call.to_cpu(tensor);
      if (tensor.defined() && tensor.device().type() == kType) {
        drain_for(line, tensor.storage().data());
        touch(tensor.storage().data(), written, line, name);
      }
      return seen;
    });
  }
  for (auto& stranger : call.strangers)
    TORCH_CHECK(!call.found || !stranger.dim() || kMixed.count(name), "Expected all tensors to be on the same device, "
                "but found at least two devices, ", call.device, " and ", stranger.device(), "! (", name, ")");
  lock.unlock();
  {
    std::optional<OtherNumbers> numbers;
    if (draws) numbers.emplace(default_generator(call.device.index()).get<Generator>()->draw());
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
    Counted now(inside);
    Kernel timed(line);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  lock.lock();
  call.follow_resizes();
  bool waits = kSynchronous.count(name);
  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    waits |= value.isScalar() || value.isBool() || value.isInt() || value.isDouble();
    value = mapped(value, [&](const at::Tensor& tensor) { return call.to_device(tensor, line, name); });
  }
  if (waits) host_waits(line);
}

template <class F>
std::vector<at::Tensor> as_kernel(const at::Tensor& like, const char* name, const std::vector<at::Tensor>& read, F f) {
  OnDevice on(like.device().index());
  const int line = line_now();
  std::unique_lock<std::recursive_mutex> lock(mutex);
  begin_op(line);
  for (auto& tensor : read)
    if (tensor.defined() && tensor.device().type() == kType) {
      drain_for(line, tensor.storage().data());
      touch(tensor.storage().data(), false, line, name);
    }
  lock.unlock();
  std::vector<at::Tensor> made = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
    Counted now(inside);
    Kernel timed(line);
    return f();
  }();
  lock.lock();
  std::unordered_map<StorageImpl*, c10::Storage> on_device;
  for (auto& tensor : made) {
    if (!tensor.defined()) continue;
    auto& storage = on_device[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = moved(tensor.storage().unsafeGetStorageImpl(), like.device());
      touch(storage.data(), true, line, name);
    }
    tensor = over(storage, DispatchKey::PrivateUse1, tensor);
  }
  return made;
}

at::Tensor argument_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const std::string& name) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = stack[stack.size() - arguments.size() + i];
    if (arguments[i].name() == name && value.isTensor()) return value.toTensor();
  }
  return {};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

// Torch has kernels for all devices for some ops, which round otherwise or resize results with a warning; the CPU's own
// come before these, as those of CUDA do.
void prefer_cpu_kernels() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || name.name.rfind("aten::", 0) || !op->hasKernelForDispatchKey(DispatchKey::CPU)) continue;
    bool for_all = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                   op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (!for_all || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
    auto short_name = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
  }
}

}  // namespace standin
