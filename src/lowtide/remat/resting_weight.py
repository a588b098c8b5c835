"""A weight that rests on a store, read into memory once more in backward."""

from torch import fx

from lowtide.facts import Action
from lowtide.offload.fetched_weight import finish_fetch, start_fetch
from lowtide.ops.calls import Call
from lowtide.remat.rule import Kept, RematRule


class RestingWeight(RematRule):
    """Nothing is written: the store has the weight all along.

    The rule is for the ops that `runtime/fetches.py` puts into a graph, and fits no op that was captured.
    """

    name = "rest"
    words = "read once more from the store, where the weight rests"
    action = Action.OFFLOAD
    wait = staticmethod(finish_fetch)

    def why_not(self, node: fx.Node) -> str | None:
        return None

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        return Call(start_fetch, (node.args[0],))
