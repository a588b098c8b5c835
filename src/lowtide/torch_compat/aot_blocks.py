"""AOTAutograd traces five of a model's equal blocks; the joint graph of all blocks is made from theirs.

AOTAutograd runs a Dynamo graph twice on fake tensors: to learn what the graph does to its inputs, and to
trace forward and backward. While `TracedOnce` is on, both run the shortened graph, and what they
find is extended to all inputs and blocks. Where blocks are not equal, AOTAutograd runs the whole graph.
"""

import contextlib
import dataclasses
import logging
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import aot_autograd as frontend
from torch._functorch._aot_autograd import collect_metadata_analysis, graph_capture, graph_compile
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput
from torch._functorch._aot_autograd.graph_capture_wrappers import create_functional_call
from torch._functorch._aot_autograd.schemas import MutationType, OutputType, PlainTensorMeta
from torch._functorch._aot_autograd.utils import simple_wraps

from lowtide.torch_compat.dispatch import storage_key
from lowtide.torch_compat.equal_blocks import BlockChain, NotEqual, check, layout_of, shortened
from lowtide.torch_compat.joint_copies import expanded

OF_INPUTS = ("input_info", "subclass_inp_meta", "static_input_indices", "act_input_indices")
"""The fields of torch's notes about a graph that have something for each input."""

WRITES = "the model writes into a buffer or an input"
WRITES_BUFFERS = ("batch_norm", "instance_norm")

logger = logging.getLogger("lowtide")
_torchs_metadata = collect_metadata_analysis.run_functionalized_fw_and_collect_metadata
_torchs_joint = graph_capture.aot_dispatch_autograd_graph


class TracedOnce:
    """AOTAutograd's two runs of a graph, with five blocks of a chain. `mark` writes what has to be known of a
    joint graph as torch traced it into its notes; afterwards, `is_marked` says whether it did."""

    def __init__(self, chain: BlockChain, mark: Callable[[fx.Graph], None]) -> None:
        self.chain, self.mark, self.is_marked = chain, mark, False
        numbers = {node: number for number, node in enumerate(chain.inputs)}
        gone = {node for number in chain.dropped for node in chain.own_inputs[number]}
        self.kept = [number for node, number in numbers.items() if node not in gone]
        """the inputs of the short graph, by their numbers in the long one"""
        self.stand_ins = list(numbers.values())
        """for each input the one that stands for it in the short graph"""
        for number in chain.dropped:
            for node, like in zip(chain.own_inputs[number], chain.own_inputs[chain.template], strict=True):
                self.stand_ins[numbers[node]] = numbers[like]
        self.own = {numbers[node] for nodes in chain.own_inputs for node in nodes}
        self.run: Callable[..., Any] = create_functional_call(shortened(chain), [], 0)
        self.short_metadata: Any = None
        self.long_metadata: Any = None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        with (
            unittest.mock.patch.object(frontend, "run_functionalized_fw_and_collect_metadata", self.metadata),
            unittest.mock.patch.object(graph_compile, "aot_dispatch_autograd_graph", self.joint),
        ):
            yield

    def metadata(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """What torch notes about a graph's inputs and outputs."""

        @simple_wraps(function)
        def inner(*args: Any) -> Any:
            try:
                return self._metadata(args, options)
            except NotEqual as reason:
                _tell(reason)
                return _torchs_metadata(function, **options)(*args)

        return inner

    def joint(
        self,
        function: Callable[..., Any],
        args: list[Any],
        descriptions: list[Any],
        config: Any,
        *,
        fw_metadata: Any,
    ) -> Any:
        """The joint graph, and its inputs with their descriptions, as torch returns them."""
        if fw_metadata is self.long_metadata and len(args) == len(self.stand_ins):
            try:
                return self._joint(args, descriptions, config)
            except NotEqual as reason:
                _tell(reason)
        return _torchs_joint(function, args, descriptions, config, fw_metadata=fw_metadata)

    def _metadata(self, args: Sequence[Any], options: dict[str, Any]) -> Any:
        check(len(args) == len(self.stand_ins), "the graph has other inputs than its code")
        ops = self.chain.blocks[self.chain.template]
        is_normed = any(getattr(node.target, "__name__", "") in WRITES_BUFFERS for node in ops)
        check(not is_normed, WRITES)  # known before any run
        for arg, number in zip(args, self.stand_ins, strict=True):
            check(layout_of(arg) == layout_of(args[number]), "blocks have weights of different layouts")
        is_strided = all(isinstance(arg, torch.Tensor) and arg.layout is torch.strided for arg in args)
        check(is_strided, "the graph has inputs that are no plain tensors")
        owners = Counter(map(storage_key, args))
        is_shared = any(owners[storage_key(args[number])] > 1 for number in self.own)
        check(not is_shared, "weights of blocks share memory")
        static = set(options.get("static_input_indices") or ())
        options = options | {
            "flat_args_descs": self._short_descriptions(options["flat_args_descs"]),
            "static_input_indices": [place for place, number in enumerate(self.kept) if number in static],
        }
        short = _torchs_metadata(self.run, **options)(*(args[number] for number in self.kept))
        is_unchanged = all(info.mutation_type is MutationType.NOT_MUTATED for info in short.input_info)
        check(is_unchanged and not short.tokens, WRITES)
        is_new = all(info.output_type is OutputType.non_alias for info in short.output_info)
        check(is_new and not short.num_intermediate_bases, "the graph returns views")
        is_plain = all(isinstance(meta, PlainTensorMeta) for meta in short.subclass_inp_meta)
        check(is_plain, "the graph has tensors of subclasses")
        places = {number: place for place, number in enumerate(self.kept)}
        infos = [short.input_info[places[number]] for number in self.stand_ins]
        metas = [short.subclass_inp_meta[places[number]] for number in self.stand_ins]
        self.short_metadata = short
        self.long_metadata = dataclasses.replace(
            short,
            input_info=[dataclasses.replace(info) for info in infos],
            subclass_inp_meta=[
                PlainTensorMeta(number, meta.memory_format) for number, meta in enumerate(metas)
            ],
            static_input_indices=sorted(static),
        )
        return self.long_metadata

    def _joint(self, args: list[Any], descriptions: list[Any], config: Any) -> Any:
        short, long = self.short_metadata, self.long_metadata
        graph, inputs, input_descriptions, subclasses = _torchs_joint(
            self._run_with_descriptions,
            [args[number] for number in self.kept],
            self._short_descriptions(descriptions),
            config,
            fw_metadata=short,
        )
        check(subclasses is None, "the graph has tensors of subclasses")
        self.mark(graph.graph)
        values = [graph_capture._detach_and_copy_item_memo(arg) for arg in args]
        graph = expanded(graph, self.chain, values, descriptions)
        for field in dataclasses.fields(long):
            if field.name not in OF_INPUTS:
                setattr(long, field.name, getattr(short, field.name))
        self.is_marked = True
        return graph, (values, inputs[1]), (descriptions, input_descriptions[1]), None

    def _short_descriptions(self, descriptions: Sequence[Any]) -> list[Any]:
        is_plain = all(isinstance(each, PlainAOTInput) for each in descriptions)
        check(is_plain, "the graph has inputs of torch's own")
        return [PlainAOTInput(place) for place in range(len(self.kept))]

    def _run_with_descriptions(self, *args: Any) -> tuple[Any, Any]:
        found = self.run(*args)
        return found, type(found)(PlainAOTOutput(place) for place in range(len(found)))


def _tell(reason: Exception) -> None:
    logger.info("equal blocks of the model are traced one by one: %s", reason)
