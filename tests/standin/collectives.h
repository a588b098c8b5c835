// Collectives between processes with a device each: copies to the host, gloo there, and copies back.
//
// As those of NCCL they run on a stream of their own, behind the current one; `wait` and futures let the current stream
// wait for them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tensors.h"

namespace standin {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

struct Collective final : c10d::Work {
  Collective(OpType type, Tensors made, c10::Stream stream) : Work(-1, type), made(made), done(kType) {
    done.record(stream);
    auto list = c10::ListType::create(c10::TensorType::get());
    future = c10::make_intrusive<c10::ivalue::Future>(list, std::vector<Device>{stream.device()});
    c10::StreamGuard on(stream);
    future->markCompleted(c10::IValue(made));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return synchronize(), true; }
  void synchronize() override { done.block(c10::impl::VirtualGuardImpl(kType).getStream(Device(kType, done.device_index()))); }
  Tensors result() override { return made; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  Tensors made;
  c10::Event done;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

struct Collectives final : c10d::Backend {
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo) {}
  const std::string getBackendName() const override { return "standin"; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return run(OpType::BROADCAST, tensors, {}, [&](Tensors& out, Tensors&) { return gloo->broadcast(out, o); });
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return run(OpType::ALLREDUCE, tensors, {}, [&](Tensors& out, Tensors&) {
      for (auto& one : out) {
        Tensors alone{one};
        gloo->allreduce(alone, summing(o))->wait();
      }
      return averaged(out, o.reduceOp);
    });
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return allreduce(tensors, o);
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return run(OpType::REDUCE, tensors, {}, [&](Tensors& out, Tensors&) {
      gloo->reduce(out, summing(o))->wait();
      return averaged(out, o.reduceOp);
    });
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    return run(OpType::ALLGATHER, outputs.at(0), inputs, [&](Tensors& out, Tensors& in) {
      std::vector<Tensors> lists{out};
      return gloo->allgather(lists, in, o);
    });
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, o);
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    return run(OpType::_ALLGATHER_BASE, outputs, inputs, [&](Tensors& out, Tensors& in) {
      for (size_t i = 0; i < out.size(); ++i) gloo->_allgather_base(out[i], in[i], o)->wait();
      return WorkPointer();
    });
  }
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    return run(OpType::REDUCE_SCATTER, outputs, inputs.at(0), [&](Tensors& out, Tensors& in) {
      return scattered(out[0], at::stack(in), o);
    });
  }
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& o) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, o);
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& o) override {
    return run(OpType::_REDUCE_SCATTER_BASE, outputs, inputs, [&](Tensors& out, Tensors& in) {
      for (size_t i = 0; i < out.size(); ++i) scattered(out[i], in[i], o);
      return WorkPointer();
    });
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    return run(OpType::GATHER, outputs.empty() ? Tensors() : outputs[0], inputs, [&](Tensors& out, Tensors& in) {
      auto lists = outputs.empty() ? std::vector<Tensors>() : std::vector<Tensors>{out};
      return gloo->gather(lists, in, o);
    });
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    return run(OpType::SCATTER, outputs, inputs.empty() ? Tensors() : inputs[0], [&](Tensors& out, Tensors& in) {
      auto lists = inputs.empty() ? std::vector<Tensors>() : std::vector<Tensors>{in};
      return gloo->scatter(out, lists, o);
    });
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
                            const c10d::AllToAllOptions& o) override {
    return run(OpType::ALLTOALL_BASE, {output}, {input}, [&](Tensors& out, Tensors& in) {
      return gloo->alltoall_base(out[0], in[0], to, from, o);
    });
  }
  WorkPointer send(Tensors& tensors, int rank, int tag) override {
    return run(OpType::SEND, {}, tensors, [&](Tensors&, Tensors& in) { return gloo->send(in, rank, tag); });
  }
  WorkPointer recv(Tensors& tensors, int rank, int tag) override {
    return run(OpType::RECV, tensors, {}, [&](Tensors& out, Tensors&) { return gloo->recv(out, rank, tag); });
  }
  WorkPointer barrier(const c10d::BarrierOptions& o) override {
    for (DeviceIndex i = 0; i < kDevices; ++i) standin::synchronize(i);
    return gloo->barrier(o);
  }

 private:
  template <class Options>
  static Options summing(Options options) {  // gloo has no average
    if (options.reduceOp == c10d::ReduceOp::AVG) options.reduceOp = c10d::ReduceOp::SUM;
    return options;
  }
  WorkPointer averaged(Tensors& tensors, const c10d::ReduceOp& op) const {
    if (op == c10d::ReduceOp::AVG)
      for (auto& one : tensors) one.div_(getSize());
    return {};
  }
  WorkPointer scattered(at::Tensor& out, const at::Tensor& in, const c10d::ReduceScatterOptions& o) {
    c10d::AllreduceOptions all;
    all.reduceOp = o.reduceOp;
    Tensors sums{in.contiguous()};
    gloo->allreduce(sums, summing(all))->wait();
    averaged(sums, o.reduceOp);
    out.copy_(sums[0].view({getSize(), -1})[getRank()].view_as(out));
    return {};
  }
  c10::Stream stream_of(Device device) {
    auto& own = streams[device.index()];
    if (!own) own = c10::impl::VirtualGuardImpl(kType).getNewStream(device);
    return *own;
  }
  template <class F>
  WorkPointer run(OpType type, const Tensors& outputs, const Tensors& inputs, F f) {  // no inputs: in place
    at::AutoDispatchBelowADInplaceOrView below;
    Counted now(unseen);
    const auto device = (outputs.empty() ? inputs : outputs).at(0).device();
    auto stream = stream_of(device);
    c10::Event before(kType);
    before.record(c10::impl::VirtualGuardImpl(kType).getStream(device));
    before.block(stream);
    c10::StreamGuard on(stream);
    Tensors out, in;
    for (const auto& one : outputs) {
      allocator().recordStream(one.storage().data_ptr(), stream);
      out.push_back(inputs.empty() ? one.to(at::kCPU).contiguous() : at::empty(one.sizes(), one.options().device(at::kCPU)));
    }
    for (const auto& one : inputs) {
      allocator().recordStream(one.storage().data_ptr(), stream);
      in.push_back(one.to(at::kCPU).contiguous());
    }
    if (auto work = f(out, in)) work->wait();
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].detach().copy_(out[i]);
    return c10::make_intrusive<Collective>(type, outputs, stream);
  }
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::array<std::optional<c10::Stream>, kDevices> streams;
};

}  // namespace standin
