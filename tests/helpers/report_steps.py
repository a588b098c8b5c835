"""A made-up but plausible training step: convolution, batch norm, relu, many times over."""

from dataclasses import dataclass, field

from lowtide.facts import Kind, Node, Region, Remat, Step, Storage

MIB = 2**20


@dataclass
class _Builder:
    nodes: list[Node] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    stacks: dict[tuple[str, ...], int] = field(default_factory=lambda: {(): 0})

    def storage(
        self, nbytes: int, kind: Kind, name: str, *, static: bool = False, pinned: bool = False
    ) -> int:
        storage_id = len(self.storages)
        self.storages.append(
            Storage(id=storage_id, nbytes=nbytes, kind=kind, name=name, static=static, pinned=pinned)
        )
        return storage_id

    def node(
        self,
        name: str,
        op: str,
        region: Region,
        kind: Kind,
        *,
        reads: tuple[int, ...] = (),
        makes: tuple[int, ...] = (),
        holds: tuple[int, ...] = (),
        seconds: float = 0.0,
        workspace_bytes: int = 0,
        module: str = "",
        how: str | None = None,
    ) -> int:
        remat = how and Remat(
            rule=how,
            reads=reads,
            holds=makes + holds,
            makes=makes,
            seconds=seconds,
            workspace_bytes=workspace_bytes,
        )
        rank = len(self.nodes)
        source = f"models/residual.py:{40 + rank % 60}, in forward" if module else ""
        stack = ("models/main.py:7", source) if source else ()
        self.nodes.append(
            Node(
                rank=rank,
                name=name,
                op=op,
                region=region,
                kind=kind,
                module=module,
                source=source,
                stack=self.stacks.setdefault(stack, len(self.stacks)),
                reads=reads,
                makes=makes,
                holds=makes + holds,
                seconds=seconds,
                workspace_bytes=workspace_bytes,
                remats=(remat,) if remat else (),
                fixed="" if remat else "an input of the step",
            )
        )
        return rank


def residual_step(num_layers: int = 12, *, module: str = "encoder.stages.{stage}.layers.{layer}") -> Step:
    """A step of `23 * num_layers + 3` nodes; `module` names the modules."""
    b = _Builder()
    params = [_parameters(b, layer, 2 ** (4 * layer // num_layers)) for layer in range(num_layers)]
    batch = b.storage(3 * MIB, Kind.INPUT, "pixel_values", static=True)
    value = b.node("pixel_values", "placeholder", Region.FORWARD, Kind.INPUT, holds=(batch,))
    layers = []
    for layer in range(num_layers):
        stage = 4 * layer // num_layers
        where = module.format(stage=stage, layer=layer)
        layers.append(_forward_layer(b, layer, value, params[layer], nbytes=8 * MIB // 2**stage, where=where))
        value = layers[-1].relu
    loss = b.storage(4, Kind.OTHER, "loss", pinned=True)
    b.node(
        "loss", "aten.sum.default", Region.FORWARD, Kind.OTHER, reads=(value,), makes=(loss,), seconds=1e-4
    )
    start = b.storage(4, Kind.INPUT, "tangents", static=True)
    flow = b.node("tangents_1", "placeholder", Region.BACKWARD, Kind.INPUT, holds=(start,))
    grads: list[tuple[int, int]] = []
    for layer in reversed(layers):
        flow, found = _backward_layer(b, layer, flow)
        grads += found
    for param, grad in grads:
        _optimize(b, param, grad)
    return Step(
        nodes=tuple(b.nodes),
        storages=tuple(b.storages),
        fingerprint="0f" * 8,
        notes=("one graph, no graph breaks",),
        stacks=tuple(b.stacks),
        copy_bytes_per_second=8e9,
        rules=(("again", "recomputed"), ("no_stats", "recomputed without counting statistics")),
    )


@dataclass(frozen=True)
class _Layer:
    index: int
    source: int
    params: list[int]
    conv: int
    items: list[int]
    relu: int
    nbytes: int
    where: str


def _parameters(b: _Builder, layer: int, width: int) -> list[int]:
    ranks = []
    for part, nbytes in (("conv", 12000 * width * width), ("bn_w", 256 * width), ("bn_b", 256 * width)):
        held = b.storage(nbytes, Kind.PARAMETER, f"p_{layer}_{part}", static=True)
        ranks.append(
            b.node(f"p_{layer}_{part}", "placeholder", Region.FORWARD, Kind.PARAMETER, holds=(held,))
        )
    return ranks


def _forward_layer(
    b: _Builder, layer: int, value: int, params: list[int], *, nbytes: int, where: str
) -> _Layer:
    forward, act = Region.FORWARD, Kind.ACTIVATION
    conv = b.node(
        f"convolution_{layer}", "aten.convolution.default", forward, act, reads=(value, params[0]),
        makes=(b.storage(nbytes, act, f"convolution_{layer}"),), seconds=7e-3, workspace_bytes=nbytes // 2,
        module=f"{where}.conv", how="again",
    )  # fmt: skip
    outs = tuple(b.storage(size, act, f"bn_{layer}_{i}") for i, size in enumerate((nbytes, 2048, 2048)))
    norm = b.node(
        f"native_batch_norm_{layer}", "aten.native_batch_norm.default", forward, act,
        reads=(conv, params[1], params[2]), makes=outs, seconds=2.2e-3, module=f"{where}.bn",
        how="no_stats",
    )  # fmt: skip
    items = [
        b.node(
            f"getitem_{3 * layer + i}", "operator.getitem", forward, act, reads=(norm,), holds=(out,),
            module=f"{where}.bn", how="again",
        )
        for i, out in enumerate(outs)
    ]  # fmt: skip
    relu = b.node(
        f"relu_{layer}", "aten.relu.default", forward, act, reads=(items[0],),
        makes=(b.storage(nbytes, act, f"relu_{layer}"),), seconds=0.9e-3, module=f"{where}.act",
        how="again",
    )  # fmt: skip
    return _Layer(layer, value, params, conv, items, relu, nbytes, where)


def _backward_layer(b: _Builder, layer: _Layer, flow: int) -> tuple[int, list[tuple[int, int]]]:
    backward, other, index, nbytes = Region.BACKWARD, Kind.OTHER, layer.index, layer.nbytes
    mask = b.node(
        f"threshold_backward_{index}", "aten.threshold_backward.default", backward, other,
        reads=(flow, layer.relu), makes=(b.storage(nbytes, other, f"threshold_backward_{index}"),),
        seconds=1.1e-3, module=f"{layer.where}.act",
    )  # fmt: skip
    outs = [b.storage(nbytes, other, f"norm_backward_{index}")]
    outs += [b.storage(256, Kind.GRADIENT, f"bn_grad_{index}_{i}", pinned=True) for i in range(2)]
    norm = b.node(
        f"native_batch_norm_backward_{index}", "aten.native_batch_norm_backward.default", backward, other,
        reads=(mask, layer.conv, layer.items[1], layer.items[2]), makes=tuple(outs), seconds=4.1e-3,
        module=f"{layer.where}.bn",
    )  # fmt: skip
    parts = [
        b.node(f"bn_item_{index}_{i}", "operator.getitem", backward, other, reads=(norm,), holds=(out,))
        for i, out in enumerate(outs)
    ]
    weight_bytes = b.storages[b.nodes[layer.params[0]].holds[0]].nbytes
    outs = [
        b.storage(nbytes, other, f"conv_backward_{index}"),
        b.storage(weight_bytes, Kind.GRADIENT, f"conv_grad_{index}", pinned=True),
    ]
    conv = b.node(
        f"convolution_backward_{index}", "aten.convolution_backward.default", backward, other,
        reads=(parts[0], layer.source, layer.params[0]), makes=tuple(outs), seconds=15e-3,
        workspace_bytes=nbytes, module=f"{layer.where}.conv",
    )  # fmt: skip
    items = [
        b.node(f"conv_item_{index}_{i}", "operator.getitem", backward, other, reads=(conv,), holds=(out,))
        for i, out in enumerate(outs)
    ]
    return items[0], list(zip(layer.params, (items[1], parts[1], parts[2]), strict=True))


def _optimize(b: _Builder, param: int, grad: int) -> None:
    size = b.storages[b.nodes[param].holds[0]].nbytes
    state = b.storage(2 * size, Kind.OPTIMIZER_STATE, f"state_{param}", static=True)
    mul = b.node(
        f"mul_{param}", "aten.mul.Tensor", Region.OPTIMIZER, Kind.OTHER, reads=(param, grad),
        makes=(b.storage(size, Kind.OTHER, f"adam_{param}"),), holds=(state,), seconds=size * 2e-8,
    )  # fmt: skip
    b.node(
        f"copy_{param}", "aten.copy_.default", Region.OPTIMIZER, Kind.OTHER, reads=(mul,), seconds=size * 1e-8
    )
