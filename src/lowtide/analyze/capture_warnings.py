"""What a capture says about parts of a step that are not counted, or may not be exact."""

import logging

from lowtide.analyze.gradient_sums import shares_gradients, summed_inside_op
from lowtide.facts import Step
from lowtide.trace.segments import Trace

UNCAPTURED = (
    "the model or its loss runs differentiable code outside of its graphs that torch.compile does not follow"
)
NOT_COUNTED = "; what autograd keeps of it is counted, what it holds while its backward pass runs is not"
COUNTED = "; what it holds is counted as it was seen when the step was captured"

logger = logging.getLogger("lowtide")

HOOKS = "backward hooks of modules do not run while a step is planned: what they keep live is not counted"


def warn_of(step: Step, traced: Trace) -> None:
    """Warn of parts of a captured step that are not counted, or may not be exact."""
    if UNCAPTURED + NOT_COUNTED in step.notes:
        logger.warning(
            "%s, so budgets are kept only for the rest: lowtide.verify says what the whole takes",
            UNCAPTURED + NOT_COUNTED,
        )
    elif UNCAPTURED + COUNTED in step.notes:
        logger.warning(
            "%s. Another batch may take more there, and gradients of what it shares with the graphs may be "
            "summed in another order than in eager: lowtide.verify says what a step takes and whether it is "
            "exact",
            UNCAPTURED + COUNTED,
        )
    if shared := summed_inside_op(traced):
        graphs, later = "the graph of the model", "other code"
        if traced.num_in_model > 1:
            graphs = f"the model breaks into {traced.num_in_model} graphs, and one of them"
            later = "a later one"
        logger.warning(
            "%s uses %s in a recurrent layer before %s uses it again: its gradients are summed in another "
            "order than in eager, so that the last bits can differ. lowtide.verify says whether; "
            "torch._dynamo.explain shows where graphs end",
            graphs,
            shared,
            later,
        )
    elif shares_gradients(traced, [graph.missing for graph in step.graphs]):
        logger.warning(
            "the model returns several views of one value that it also uses itself: the gradients of that "
            "value are summed in another order than in eager, so that the last bits can differ. "
            "lowtide.verify says whether they do; return a copy of the views (`.clone()`) to be exact"
        )
