// Streams and events: what is ordered, what waits, what takes time, and accesses that nothing orders.
//
// Order: each stream has a vector clock. An access of one block by two streams that no event orders is a race, and noted.
//
// Waiting: if `lazy`, asynchronous copies run as late as they may: on side streams when somebody waits for them, on the
// default stream when the host waits or an op needs one of their blocks. So the host sees pinned memory as it was
// before, and a copy sees what the host has written to its source meanwhile. A copy that no event puts behind the op
// that makes its source runs before that op: it gives zeros.
//
// Time: kernels take none of the host's, and each stream has a time of its own, which begins for an op where the host
// has started it and the stream is done with all before. Events tell these times.
#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace standin {

using c10::Device;
using c10::DeviceIndex;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kStreams = 16;  // of each device; 0 is the default one
constexpr int kLines = kDevices * kStreams;

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

thread_local DeviceIndex current_device = 0;
thread_local std::array<int, kDevices> current_stream{};
thread_local int inside = 0;  // a kernel of the device runs in this thread: what it allocates is the device's

thread_local int unseen = 0;  // the host only stands in for somebody else: what it waits for tells it nothing

struct Counted {  // a count is one higher, for a while
  explicit Counted(int& count) : count(count) { ++count; }
  ~Counted() { --count; }
  int& count;
};

struct OnDevice {  // the current device of this thread, for a while
  explicit OnDevice(DeviceIndex index) : before(current_device) { current_device = index; }
  ~OnDevice() { current_device = before; }
  DeviceIndex before;
};

using Ticks = std::array<uint64_t, kLines>;

void join(Ticks& into, const Ticks& other) {
  for (int i = 0; i < kLines; ++i) into[i] = std::max(into[i], other[i]);
}

using Time = std::chrono::nanoseconds;

struct Waiting {  // a copy that has not run yet, and the blocks that it uses
  std::function<void()> run;
  std::array<const void*, 2> blocks;
};

struct Line {  // a stream: what it knows to come before its next op, copies that have not run yet, and its time
  Ticks known{};
  std::deque<Waiting> waiting;
  uint64_t queued = 0, done = 0;
  Time free_at{0};
};

struct Event {
  int line = -1;
  uint64_t upto = 0;
  Ticks known{};
  bool timed = false;
  Time when{0};
};

std::array<Line, kLines> lines;
Ticks host_knows{};  // what the host has waited for comes before whatever it starts later
bool lazy = false;
std::vector<std::string> races;
std::array<int, kDevices> last_stream{};

int line_of(DeviceIndex device, int64_t stream) { return device * kStreams + static_cast<int>(stream); }
int line_of(const c10::Stream& s) { return line_of(s.device_index(), s.id()); }
int line_now() { return line_of(current_device, current_stream[current_device]); }

Time in_kernels{0};  // of the host's time, which it would not have spent if kernels ran elsewhere

Time host_time() { return std::chrono::steady_clock::now().time_since_epoch() - in_kernels; }
Time time_of(int line) { return std::max(lines[line].free_at, host_time()); }

struct Kernel {  // as long as it lives, a kernel runs on a stream
  explicit Kernel(int line) : line(line), begun(std::chrono::steady_clock::now()) {}
  ~Kernel() {
    Lock lock(mutex);
    const Time taken = std::chrono::steady_clock::now() - begun;
    in_kernels += taken;
    lines[line].free_at = time_of(line) + taken;
  }
  int line;
  std::chrono::steady_clock::time_point begun;
};

void drain(int line, uint64_t upto) {
  Lock lock(mutex);
  auto& own = lines[line];
  while (own.done < std::min(upto, own.queued)) {
    auto copy = std::move(own.waiting.front());
    own.waiting.pop_front();
    ++own.done;
    copy.run();
  }
}

bool is_default(int line) { return line % kStreams == 0; }

void drain_for(int line, const void* block) {  // what an op on this stream needs to be over, if it uses this block
  Lock lock(mutex);
  if (!is_default(line)) return drain(line, UINT64_MAX);
  const auto& own = lines[line];
  for (size_t i = own.waiting.size(); i-- > 0;)
    if (own.waiting[i].blocks[0] == block || own.waiting[i].blocks[1] == block) return drain(line, own.done + i + 1);
}

void host_waits(int line, uint64_t upto, const Ticks& known, Time until) {
  Lock lock(mutex);
  drain(line, upto);
  if (unseen) return;
  join(host_knows, known);
  in_kernels -= std::max(Time(0), until - host_time());
}

void host_waits(int line) {
  Lock lock(mutex);
  drain(line, UINT64_MAX);
  host_waits(line, 0, lines[line].known, lines[line].free_at);
}

void synchronize(DeviceIndex device) {
  for (int i = 0; i < kStreams; ++i) host_waits(line_of(device, i));
}

}  // namespace standin
