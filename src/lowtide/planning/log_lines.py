"""Lines of the log about steps, their ops and the decisions of plans."""

from lowtide.facts import Decision, Node, Step
from lowtide.planning.schedules import eager_timeline
from lowtide.units import format_size


def kind_of(model: object) -> str:
    return f"a {type(model).__name__}"


def step_line(step: Step) -> str:
    """The size of a captured step, and the batch that it is for."""
    graphs = sum(graph.in_model for graph in step.graphs)
    number = f"{graphs} {'graph' if graphs == 1 else 'graphs'}"
    return f"{number}, {len(step.nodes)} nodes, for {dict(step.identity)['batch']}"


def baseline_line(step: Step) -> str:
    """The baseline's peak and time."""
    found = eager_timeline(step)
    return f"peak {format_size(found.peak_bytes)} at '{found.peak_node}', step {found.seconds * 1e3:.1f} ms"


def cost_line(node: Node) -> str:
    """The cost of one op."""
    rough = ", estimated" if node.estimated else ""
    return f"{node.name} ({node.op}) {node.seconds * 1e6:.0f} us, {node.workspace_bytes} bytes inside{rough}"


def decision_line(decision: Decision) -> str:
    """What a plan does with an activation, and why."""
    where = f" of {decision.module}" if decision.module else ""
    added = f", {decision.seconds * 1e6:.0f} us more" if decision.seconds else ""
    size = format_size(decision.nbytes)
    return f"{decision.action} {decision.name}{where}, {size}{added}: {decision.reason}"
