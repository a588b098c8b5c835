// Tensors of the device: made, copied, resized, and handed to streams.
#pragma once

#include <ATen/NativeFunctions.h>

#include "kernels.h"

namespace standin {

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(device && device->has_index() ? device->index() : current_device);
  return at::detail::empty_generic(size, &allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(device && device->has_index() ? device->index() : current_device);
  return at::detail::empty_strided_generic(size, stride, &allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto device = from.device().type() == kType ? from.device() : to.device();
  OnDevice on(device.index());
  const int line = line_now();
  auto pinned = [](const at::Tensor& t) { return pinned_arena().has(t.storage().data()); };
  const bool both = from.device().type() == kType && to.device().type() == kType;
  const bool async = both || (non_blocking && (pinned(from) || pinned(to)));
  std::unique_lock<std::recursive_mutex> lock(mutex);
  const auto there = both ? to.device().index() : device.index();  // streams of both devices wait for each other
  const int other = line_of(there, current_stream[there]);
  join(lines[line].known, lines[other].known);
  begin_op(line);
  join(lines[other].known, lines[line].known);
  bool early = false;  // the copy may be before the op that makes what it reads
  for (auto* tensor : {&from, &to}) {
    const void* p = tensor->storage().data();
    const bool races_any = touch(p, tensor == &to, line, "aten::copy_");
    early |= lazy && races_any && tensor == &from;
    if (async && pinned_arena().has(p)) blocks().at(p)->others.insert(line);
  }
  lock.unlock();  // kernels run without it: they may need Python's own lock
  auto seen = [](const at::Tensor& t) { return t.device().type() == kType || pinned_arena().has(t.storage().data()) ? alias_of(t) : t; };
  const bool waits = lazy && async && !(both && is_default(line));
  const bool to_host = waits && is_default(line) && to.device().is_cpu();  // of what the stream has by now
  auto source = to_host ? seen(from).clone() : seen(from);
  auto run = [source, target = seen(to), line, early]() mutable {
    OnDevice again(line / kStreams);
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
    Counted now(inside);
    Kernel timed(line);
    early ? target.zero_() : target.copy_(source);
  };
  if (waits) {
    lock.lock();
    lines[line].waiting.push_back({run, {to_host ? nullptr : from.storage().data(), to.storage().data()}});
    ++lines[line].queued;
    return to;
  }
  for (auto* tensor : {&from, &to}) drain_for(line, tensor->storage().data());
  run();
  if (!async) host_waits(line);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_empty(at::Tensor& self) {
  OnDevice on(self.device().index());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &allocator(), true);
  return self.set_(storage, 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

at::MemoryFormat convolution_format(const at::Tensor& input, const at::Tensor& weight) {  // as cuDNN has it
  if (input.scalar_type() == at::kDouble || weight.dim() < 4) return at::MemoryFormat::Contiguous;
  const auto last = weight.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  const bool is_last = input.suggest_memory_format() == last || weight.suggest_memory_format() == last;
  return is_last ? last : at::MemoryFormat::Contiguous;
}

void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto weight = argument_of(op, *stack, "weight");
  const auto format = convolution_format(argument_of(op, *stack, "input"), weight);
  auto lay = [&](size_t count) {
    for (size_t i = stack->size() - count; i < stack->size(); ++i) {
      auto tensor = (*stack)[i].isTensor() ? (*stack)[i].toTensor() : at::Tensor();
      if (tensor.defined()) (*stack)[i] = tensor.dim() == weight.dim() ? tensor.contiguous(format) : tensor.contiguous();
    }
  };
  lay(op.schema().arguments().size());
  by_cpu(op, stack);
  lay(op.schema().returns().size());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("set_.source_Storage", TORCH_FN(static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_)));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&convolution>());
}

// Or `model.to("standin")` would make new parameters, and no two of them would be one any more.
bool takes_data_of(const at::Tensor&, const at::Tensor&) { return true; }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(takes_data_of));
}

}  // namespace standin
