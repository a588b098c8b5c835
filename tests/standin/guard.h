// The device as torch's guards see it: current device, current streams, events.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace standin {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "invalid device ordinal");
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  static Device whole(Device device) { return device.has_index() ? device : Device(kType, current_device); }
  static c10::Stream stream_of(Device device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, whole(device), id); }
  c10::Stream getStream(Device device) const override { return stream_of(device, current_stream[whole(device).index()]); }
  c10::Stream getDefaultStream(Device device) const override { return stream_of(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    Lock lock(mutex);
    auto& last = last_stream[whole(device).index()];
    last = last % (kStreams - 1) + 1;
    return stream_of(device, last);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = static_cast<int>(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag flag) const override {
    Lock lock(mutex);
    if (!*event) {
      *event = new Event;
      static_cast<Event*>(*event)->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    }
    auto& own = *static_cast<Event*>(*event);
    own.line = line_of(stream);
    own.upto = lines[own.line].queued;
    join(lines[own.line].known, host_knows);
    own.known = lines[own.line].known;
    own.when = time_of(own.line);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Lock lock(mutex);
    auto& own = *static_cast<Event*>(event);
    drain(own.line, own.upto);
    auto& later = lines[line_of(stream)];
    join(later.known, own.known);
    later.free_at = std::max(later.free_at, own.when);
  }
  bool queryEvent(void* event) const override {
    if (event) synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto& own = *static_cast<Event*>(event);
    host_waits(own.line, own.upto, own.known, own.when);
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(line_of(stream));
  }
  void synchronizeDevice(DeviceIndex index) const override { synchronize(index < 0 ? current_device : index); }
  void recordDataPtrOnStream(const DataPtr& ptr, const c10::Stream& stream) const override {
    allocator().recordStream(ptr, stream);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    auto &a = *static_cast<Event*>(first), &b = *static_cast<Event*>(second);
    TORCH_CHECK(a.timed && b.timed, "Both events must be created with argument 'enable_timing=True'.");
    return std::chrono::duration<double, std::milli>(b.when - a.when).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace standin
