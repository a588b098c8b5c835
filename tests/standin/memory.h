// The device's memory: a range of addresses of its own behind a caching allocator, as torch's for CUDA
// (512-byte rounding, segments of 2 and 20 MiB, best fit, one pool for each stream), with statistics and a capacity;
// and pinned memory of the host.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace standin {

using c10::DataPtr;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr size_t kMiB = 1 << 20, kRound = 512, kArena = size_t(256) << 30;

struct Block {
  char* ptr = nullptr;
  size_t size = 0, requested = 0;
  int device = 0, line = 0;
  bool small = false, free = false;
  Block *before = nullptr, *after = nullptr;
  Ticks reads{}, writes{};  // when each stream last did so, whoever owned these bytes then
  std::set<int> others;     // streams of record_stream, or with asynchronous copies of pinned memory
};

struct Arena {
  char *base = nullptr, *next = nullptr;
  std::multimap<size_t, char*> given_back;
  Arena() {
    void* p = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "standin: no address space");
    base = next = static_cast<char*>(p);
  }
  bool has(const void* p) const { return p >= base && p < base + kArena; }
  char* take(size_t n) {
    auto found = given_back.find(n);
    if (found != given_back.end()) {
      char* p = found->second;
      given_back.erase(found);
      return p;
    }
    TORCH_CHECK(next + n <= base + kArena, "standin: no addresses left");
    char* p = next;
    next += n;
    return p;
  }
  void give_back(char* p, size_t n, bool to_system = true) {
    if (to_system) madvise(p, n, MADV_DONTNEED);
    given_back.emplace(n, p);
  }
};

struct Smaller {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->line, a->size, a->ptr) < std::tie(b->line, b->size, b->ptr);
  }
};

struct Memory {  // of one device; as torch's caching allocator for CUDA
  std::array<std::set<Block*, Smaller>, 2> pools;  // large, small
  c10::CachingDeviceAllocator::DeviceStats stats;
  size_t capacity = SIZE_MAX;
};

Arena& arena() {
  static auto* one = new Arena;
  return *one;
}
Arena& pinned_arena() {
  static auto* one = new Arena;
  return *one;
}
std::array<Memory, kDevices>& memories() {
  static auto* all = new std::array<Memory, kDevices>;
  return *all;
}
std::unordered_map<const void*, Block*>& blocks() {  // those in use, of devices and of pinned memory
  static auto* all = new std::unordered_map<const void*, Block*>;
  return *all;
}

size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

void count(StatArray& stat, const Block& block, int64_t amount) {
  for (auto kind : {StatType::AGGREGATE, block.small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    auto& one = stat[static_cast<size_t>(kind)];
    amount > 0 ? one.increase(amount) : one.decrease(-amount);
  }
}

void empty_cache(Memory& memory) {
  for (auto& pool : memory.pools) {
    for (auto it = pool.begin(); it != pool.end();) {
      Block* block = *it;
      if (block->before || block->after) {
        ++it;
        continue;
      }
      it = pool.erase(it);
      count(memory.stats.reserved_bytes, *block, -int64_t(block->size));
      count(memory.stats.segment, *block, -1);
      memory.stats.num_device_free++;
      arena().give_back(block->ptr, block->size);
      delete block;
    }
  }
}

Block* new_segment(Memory& memory, size_t size, bool small) {
  size_t whole = small ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : rounded(size, 2 * kMiB);
  auto reserved = [&] { return memory.stats.reserved_bytes[0].current + whole; };
  if (reserved() > memory.capacity) {
    memory.stats.num_alloc_retries++;
    synchronize(current_device);
    empty_cache(memory);
  }
  if (reserved() > memory.capacity) {
    memory.stats.num_ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "standin out of memory. Tried to allocate ", size, " bytes: device ",
                     int(current_device), " has a capacity of ", memory.capacity, " bytes, of which ",
                     memory.stats.allocated_bytes[0].current, " are allocated and ",
                     memory.stats.reserved_bytes[0].current, " reserved.");
  }
  auto* block = new Block;
  block->ptr = arena().take(whole);
  block->size = whole;
  block->device = current_device;
  block->line = line_now();
  block->small = small;
  count(memory.stats.reserved_bytes, *block, whole);
  count(memory.stats.segment, *block, 1);
  memory.stats.num_device_alloc++;
  return block;
}

void report(const Block& block, int64_t amount) {
  auto& stats = memories()[block.device].stats;
  c10::reportMemoryUsageToProfiler(block.ptr, amount, stats.allocated_bytes[0].current,
                                   stats.reserved_bytes[0].current, Device(kType, block.device));
}

void* take(size_t n) {
  if (!n) return nullptr;
  Lock lock(mutex);
  auto& memory = memories()[current_device];
  Block key;
  key.size = rounded(n, kRound);
  key.line = line_now();
  bool small = key.size <= kMiB;
  auto& pool = memory.pools[small];
  auto found = pool.lower_bound(&key);
  Block* block = nullptr;
  if (found != pool.end() && (*found)->line == key.line) {
    block = *found;
    pool.erase(found);
  } else {
    block = new_segment(memory, key.size, small);
  }
  size_t left = block->size - key.size;
  if (small ? left >= kRound : left > kMiB) {
    auto* rest = new Block(*block);
    rest->ptr = block->ptr + key.size;
    rest->size = left;
    rest->free = true;
    rest->before = block;
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->size = key.size;
    pool.insert(rest);
  }
  block->free = false;
  block->requested = n;
  blocks()[block->ptr] = block;
  auto& stats = memory.stats;
  count(stats.allocation, *block, 1);
  count(stats.allocated_bytes, *block, block->size);
  count(stats.active, *block, 1);
  count(stats.active_bytes, *block, block->size);
  count(stats.requested_bytes, *block, n);
  report(*block, block->size);
  return block->ptr;
}

void give_back(void* p) {
  if (!p) return;
  Lock lock(mutex);
  auto found = blocks().find(p);
  TORCH_INTERNAL_ASSERT(found != blocks().end(), "standin: freed what it has not allocated");
  Block* block = found->second;
  drain_for(line_of(block->device, 0), block->ptr);
  blocks().erase(found);
  auto& memory = memories()[block->device];
  auto& stats = memory.stats;
  count(stats.allocation, *block, -1);
  count(stats.allocated_bytes, *block, -int64_t(block->size));
  count(stats.active, *block, -1);
  count(stats.active_bytes, *block, -int64_t(block->size));
  count(stats.requested_bytes, *block, -int64_t(block->requested));
  report(*block, -int64_t(block->size));
  for (int line : block->others) {  // the block is used again only after these streams are done with it
    drain(line, UINT64_MAX);
    block->reads[line] = block->writes[line] = 0;
  }
  block->others.clear();
  auto& pool = memory.pools[block->small];
  auto merge = [&](Block* first, Block* second) {
    first->size += second->size;
    first->after = second->after;
    if (first->after) first->after->before = first;
    join(first->reads, second->reads);
    join(first->writes, second->writes);
    delete second;
    return first;
  };
  if (block->after && block->after->free) {
    pool.erase(block->after);
    block = merge(block, block->after);
  }
  if (block->before && block->before->free) {
    pool.erase(block->before);
    block = merge(block->before, block);
  }
  block->free = true;
  pool.insert(block);
}

struct Allocator final : c10::DeviceAllocator {
  DataPtr allocate(size_t n) override {
    void* p = take(n);
    return {p, p, &give_back, Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(mutex);
    for (DeviceIndex i = 0; i < kDevices; ++i) synchronize(i), empty_cache(memories()[i]);
  }
  void recordStream(const DataPtr& ptr, c10::Stream stream) override {
    Lock lock(mutex);
    auto found = blocks().find(ptr.get());
    if (found != blocks().end() && found->second->line != line_of(stream)) found->second->others.insert(line_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override {
    Lock lock(mutex);
    return memories().at(i).stats;
  }
  template <class F>
  void each(DeviceIndex i, F f) {
    Lock lock(mutex);
    auto& s = memories().at(i).stats;
    for (auto* stat : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes,
                       &s.requested_bytes})
      for (auto& one : *stat) f(one);
  }
  void resetAccumulatedStats(DeviceIndex i) override {
    each(i, [](auto& one) { one.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex i) override {
    each(i, [](auto& one) { one.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex i) override {
    auto& memory = memories().at(i);
    size_t total = std::min(memory.capacity, kArena / kDevices);
    return {total - memory.stats.reserved_bytes[0].current, total};
  }
};

Allocator& allocator() {
  static auto* one = new Allocator;
  return *one;
}

c10::Allocator* plain_cpu = nullptr;

void free_any(void* p) { arena().has(p) ? give_back(p) : plain_cpu->raw_deleter()(p); }

struct CpuAllocator final : c10::Allocator {  // inside of a kernel of the device, from the device's memory
  DataPtr allocate(size_t n) override {
    if (!inside) return plain_cpu->allocate(n);
    void* p = take(n);
    return {p, p, &free_any, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};

void give_pinned_back(void* p) {
  if (!p) return;
  Lock lock(mutex);
  Block* block = blocks().at(p);
  for (int line : block->others) drain(line, UINT64_MAX);  // as CUDA's, which waits for recorded events
  blocks().erase(p);
  pinned_arena().give_back(block->ptr, block->size, false);
  delete block;
}

struct HostAllocator final : at::HostAllocator {
  DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &give_pinned_back, Device(c10::kCPU)};
    Lock lock(mutex);
    auto* block = new Block;
    block->size = rounded(n, 4096);
    block->ptr = pinned_arena().take(block->size);
    blocks()[block->ptr] = block;
    return {block->ptr, block->ptr, &give_pinned_back, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_pinned_back; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool record_event(void* p, void*, c10::Stream stream) override {
    Lock lock(mutex);
    auto found = blocks().find(p);
    if (found != blocks().end()) found->second->others.insert(line_of(stream));
    return found != blocks().end();
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

HostAllocator& host_allocator() {
  static auto* one = new HostAllocator;
  return *one;
}

void begin_op(int line) {
  auto& known = lines[line].known;
  join(known, host_knows);
  ++known[line];
}

bool touch(const void* p, bool writes, int line, const std::string& op) {  // whether it is a race
  auto found = blocks().find(p);
  if (found == blocks().end()) return false;
  bool races_any = false;
  auto& known = lines[line].known;
  auto& block = *found->second;
  for (int other = 0; other < kLines; ++other) {
    if (other == line) continue;
    bool unordered = block.writes[other] > known[other] || (writes && block.reads[other] > known[other]);
    races_any |= unordered;
    if (unordered && races.size() < 100)
      races.push_back(c10::str(op, " on stream ", line, writes ? " writes" : " reads", " what stream ", other,
                               " uses, and no event orders them (", block.size, " bytes)"));
  }
  (writes ? block.writes : block.reads)[line] = known[line];
  return races_any;
}

}  // namespace standin
