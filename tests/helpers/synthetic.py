"""Steps with the shape of well-known models, for tests and benchmarks that must not need torch."""

from strategies import StepBuilder

from lowtide.facts import Kind, Region, Step

FLOPS = 60e9
BANDWIDTH = 8e9


def move(nbytes: int) -> float:
    return 2e-6 + nbytes / BANDWIDTH


class Net:
    """Records backward rules while the forward pass is built, then plays them in reverse."""

    def __init__(self) -> None:
        self.build = StepBuilder()
        self.rules: list = []
        self.size: dict[int, int] = {}

    def parameter(self, nbytes: int) -> int:
        return self.sized(self.build.given(nbytes), nbytes)

    def sized(self, rank: int, nbytes: int) -> int:
        self.size[rank] = nbytes
        return rank

    def linear(self, x: int, nbytes: int, weight_bytes: int, flops: float, *, workspace: int = 0) -> int:
        """A convolution or matrix product: backward reads its input."""
        weight = self.parameter(weight_bytes)
        seconds = flops / FLOPS
        out = self.build.op("linear", (x, weight), nbytes, seconds, workspace=workspace)

        def rule(grads: dict[int, int]) -> None:
            b, g = self.build, grads.pop(out)
            made = (
                b.storage(self.size[x], Kind.GRADIENT),
                b.storage(weight_bytes, Kind.GRADIENT, pinned=True),
            )
            pair = b.node(
                "linear_backward", (g, x, weight), makes=made, seconds=2 * seconds, workspace_bytes=workspace
            )
            self.give(grads, x, b.node("getitem", (pair,), holds=(made[0],)))
            b.node("getitem", (pair,), holds=(made[1],))

        self.rules.append(rule)
        return self.sized(out, nbytes)

    def give(self, grads: dict[int, int], x: int, gradient: int) -> None:
        if x in grads:
            gradient = self.build.grad((grads[x], gradient), self.size[x], move(3 * self.size[x]), op="add")
        grads[x] = gradient

    def pointwise(self, op: str, x: int, *, saves: str, factor: float = 2.0) -> int:
        """An op on each element; backward reads its input (`saves="in"`) or its output."""
        nbytes = self.size[x]
        out = self.build.op(op, (x,), nbytes, factor * move(nbytes))

        def rule(grads: dict[int, int]) -> None:
            saved = {"in": x, "out": out}[saves]
            g = self.build.grad((grads.pop(out), saved), nbytes, move(3 * nbytes), op=f"{op}_backward")
            self.give(grads, x, g)

        self.rules.append(rule)
        return self.sized(out, nbytes)

    def norm(self, x: int, *, stats: bool) -> int:
        nbytes = self.size[x]
        weight = self.parameter(4096)
        sizes = (nbytes, 1024, 1024, 1024, 1024) if stats else (nbytes, 2048, 2048)
        how = "no_stats" if stats else "again"
        items = self.build.several("norm", (x, weight), sizes, move(3 * nbytes), again=3, how=how)
        out, mean, rstd = items[:3]

        def rule(grads: dict[int, int]) -> None:
            g = self.build.grad(
                (grads.pop(out), x, weight, mean, rstd), nbytes, move(5 * nbytes), op="norm_backward"
            )
            self.build.grad((g,), 4096, 1e-6, pinned=True)
            self.give(grads, x, g)

        self.rules.append(rule)
        return self.sized(out, nbytes)

    def add(self, x: int, y: int) -> int:
        nbytes = self.size[x]
        out = self.build.op("add", (x, y), nbytes, move(3 * nbytes))

        def rule(grads: dict[int, int]) -> None:
            g = grads.pop(out)
            self.give(grads, x, g)
            self.give(grads, y, g)

        self.rules.append(rule)
        return self.sized(out, nbytes)

    def view(self, x: int) -> int:
        out = self.build.view(x)

        def rule(grads: dict[int, int]) -> None:
            g = grads.pop(out)
            self.give(grads, x, self.build.node("view", (g,), holds=self.build.nodes[g].holds))

        self.rules.append(rule)
        return self.sized(out, self.size[x])

    def dropout(self, x: int) -> int:
        nbytes = self.size[x]
        out, mask = self.build.dropout(x, nbytes, move(3 * nbytes))

        def rule(grads: dict[int, int]) -> None:
            self.give(
                grads, x, self.build.grad((grads.pop(out), mask), nbytes, move(3 * nbytes), op="drop_back")
            )

        self.rules.append(rule)
        return self.sized(out, nbytes)

    def product(self, x: int, y: int, nbytes: int, flops: float) -> int:
        out = self.build.op("bmm", (x, y), nbytes, flops / FLOPS)

        def rule(grads: dict[int, int]) -> None:
            g = grads.pop(out)
            self.give(grads, x, self.build.grad((g, y), self.size[x], flops / FLOPS, op="bmm_backward"))
            self.give(grads, y, self.build.grad((g, x), self.size[y], flops / FLOPS, op="bmm_backward"))

        self.rules.append(rule)
        return self.sized(out, nbytes)

    def finish(self, out: int, *, optimizer_bytes: int = 0) -> Step:
        loss = self.build.op("loss", (out,), 4, 1e-5, pinned=True)
        grads = {loss: self.build.backward()}
        grads[out] = self.build.grad((grads.pop(loss), out), self.size[out], 1e-5, op="loss_backward")
        for rule in reversed(self.rules):
            rule(grads)
        if optimizer_bytes:
            self.build.region = Region.OPTIMIZER
            self.build.node(
                "adam", (), makes=(self.build.storage(optimizer_bytes, Kind.OTHER),), seconds=1e-3
            )
        return self.build.step()


def resnet(*, blocks=(3, 8, 36, 3), batch: int = 4) -> Step:
    net = Net()
    b = net.build
    x = net.sized(b.given(batch * 3 * 224 * 224 * 4, Kind.INPUT), batch * 3 * 224 * 224 * 4)

    def conv(x: int, channels_in: int, channels: int, kernel: int, side: int) -> int:
        weight = channels_in * channels * kernel * kernel
        nbytes = batch * channels * side * side * 4
        room = nbytes if kernel == 3 else 0
        return net.linear(x, nbytes, weight * 4, 2.0 * weight * batch * side * side, workspace=room)

    b.module = "stem"
    x = net.pointwise("relu", net.norm(conv(x, 3, 64, 7, 112), stats=True), saves="out")
    channels = 64
    for stage, count in enumerate(blocks):
        width, side = 64 << stage, 56 >> stage
        for block in range(count):
            b.module = f"stages.{stage}.{block}"
            y = net.pointwise("relu", net.norm(conv(x, channels, width, 1, side), stats=True), saves="out")
            y = net.pointwise("relu", net.norm(conv(y, width, width, 3, side), stats=True), saves="out")
            y = net.norm(conv(y, width, 4 * width, 1, side), stats=True)
            if block == 0:
                x = net.norm(conv(x, channels, 4 * width, 1, side), stats=True)
            x = net.pointwise("relu", net.add(x, y), saves="out")
            channels = 4 * width
    return net.finish(net.linear(x, batch * 4000, channels * 4000, 2.0 * channels * 1000 * batch))


def transformer(
    *, layers: int = 12, width: int = 768, heads: int = 12, batch: int = 16, length: int = 128
) -> Step:
    net = Net()
    tokens = batch * length
    x = net.sized(net.build.given(tokens * width * 4, Kind.INPUT), tokens * width * 4)

    def dense(x: int, a: int, b: int) -> int:
        return net.linear(x, tokens * b * 4, a * b * 4, 2.0 * tokens * a * b)

    for layer in range(layers):
        net.build.module = f"layer.{layer}.attention"
        q, k, v = (net.view(dense(x, width, width)) for _ in range(3))
        flops = 2.0 * batch * length * length * width
        scores = net.product(q, k, batch * heads * length * length * 4, flops)
        weights = net.dropout(net.pointwise("softmax", scores, saves="out"))
        y = net.view(net.product(weights, v, tokens * width * 4, flops))
        x = net.norm(net.add(x, net.dropout(dense(y, width, width))), stats=False)
        net.build.module = f"layer.{layer}.output"
        y = net.pointwise("gelu", dense(x, width, 4 * width), saves="in", factor=4)
        x = net.norm(net.add(x, net.dropout(dense(y, 4 * width, width))), stats=False)
    return net.finish(x, optimizer_bytes=0)


def unet(*, depth: int = 4, base: int = 32, side: int = 128, batch: int = 4) -> Step:
    net = Net()
    x = net.sized(net.build.given(batch * 3 * side * side * 4, Kind.INPUT), batch * 3 * side * side * 4)

    def conv(x: int, a: int, b: int, side: int) -> int:
        out = net.linear(x, batch * b * side * side * 4, a * b * 36, 2.0 * 9 * a * b * batch * side * side)
        return net.pointwise("relu", net.norm(out, stats=True), saves="out")

    skips = []
    channels = 3
    for level in range(depth):
        net.build.module = f"down.{level}"
        width, here = base << level, side >> level
        x = conv(conv(x, channels, width, here), width, width, here)
        skips.append(x)
        x = net.linear(x, net.size[x] // 4, 64, net.size[x])
        channels = width
    for level in reversed(range(depth)):
        net.build.module = f"up.{level}"
        width, here = base << level, side >> level
        x = net.linear(x, batch * width * here * here * 4, channels * width * 16, 1e8)
        x = conv(conv(net.add(x, skips[level]), width, width, here), width, width, here)
        channels = width
    return net.finish(x)


def chain(*, length: int, nbytes: int = 1000) -> Step:
    """Ops of equal size in a row, each read again by its own backward."""
    net = Net()
    x = net.sized(net.build.given(nbytes, Kind.INPUT), nbytes)
    for layer in range(length):
        net.build.module = f"layers.{layer}"
        x = net.pointwise("tanh", x, saves="out")
    return net.finish(x)
