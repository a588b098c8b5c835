"""A dropout's result from its input and its kept mask."""

from torch import fx

from lowtide.ops.calls import Call
from lowtide.ops.random_ops import apply_mask, dropout_output
from lowtide.remat.rule import Blocks, Kept, RematRule


class DropoutFromMask(RematRule):
    name = "mask"
    words = "from its input and the kept mask"

    def why_not(self, node: fx.Node) -> str | None:
        return None if dropout_output(node) is None else ""

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        pair, dropout = dropout_output(node), node.args[0]
        assert pair is not None and isinstance(dropout, fx.Node)
        return Call(apply_mask, (*pair, dropout.args[1]))

    def blocks(self, node: fx.Node, *, makes: Blocks, holds: Blocks) -> tuple[Blocks, Blocks]:
        # the first run only takes the result out of the dropout's tuple
        return holds, holds
