"""What is said where the user's loop departs from its plan: each text once, with bytes and the next step."""

from typing import NamedTuple

OUTPUTS_LIVE = (
    "the loop keeps %s (%d bytes) of the model's outputs live through the backward pass, but the plan was "
    "made with holds_outputs=False: the peak is higher by that much. Drop the outputs before backward(), as "
    "in loss = model(...).loss, or plan with holds_outputs=True"
)
OUTPUTS_COUNTED = (
    "the loop keeps %s (%d bytes) of the last step's outputs live through the next forward pass, which the "
    "plan counts and pays for with recompute: `del` them before backward() and plan with holds_outputs=False "
    "to save these bytes"
)
OUTPUTS_COLLECTED = (
    "the loop keeps %s (%d bytes) of earlier outputs live besides those of the last call, and the plan does "
    "not count them: the peak is higher by that much, and by more with every step where a list collects "
    "them. Keep numbers (`.item()`) or a file instead, `del` what is not needed, or plan with reserve=%d"
)
GRAPH_KEPT = (
    "backward(retain_graph=True) keeps saved activations live to its end, and another pass adds to the "
    "gradients of this one: %s that the plan does not count, and the peak is higher by about that much. Add "
    "up the losses and call backward() once, or plan for a budget that is smaller by %d bytes"
)
TWO_CALLS_LIVE = (
    "the model is called again before the backward pass of its last call, which keeps %s live, and the plan "
    "does not count these bytes: the peak is higher by that much. Run backward() after each call, or plan "
    "for a budget that is smaller by %d bytes"
)
SEVERAL_CALLS = (
    "the model is called %d times before a backward pass, and earlier calls keep up to %s live that the plan "
    "does not count: this step may be over the budget by that much. From the next step on, graphs are "
    "planned for all calls of a step together"
)
CALLS_EXCEED = (
    "the calls of the model before this backward pass keep %s more live than they were planned for together: "
    "the peak of this step is higher by up to that much, and graphs are planned again for such calls"
)
TWO_CALLS_SUMMED = (
    "the model is called twice before a backward pass and uses '%s' several times in a call: each call sums "
    "its own gradients, so that the last bits can differ from eager's. Run backward() after each call"
)
EARLIER_GRADIENTS = (
    "%s of gradients are live before the forward pass, and the plan does not count them: the peak is higher "
    "by that much. Set gradients to None first (zero_grad), or, to accumulate gradients, plan with "
    "accumulate=True"
)
PATH_LONGER = (
    "values decide which graphs of the model run (dropped layers, say), and this call saves %s more for the "
    "backward pass than the plan counts: the peak of this step is higher by up to that much. Graphs are "
    "planned beside these bytes from the next step on; plan the model on its longest path to have them "
    "counted from the start"
)
GRADIENTS_STAY = (
    "backward() in eval mode leaves %s of gradients, which the step in backward would use in training mode, "
    "and the plan does not count them: the peak is higher by up to that much. Call model.train() before "
    "backward(), use torch.autograd.grad for the gradient of an input, or leave step_in_backward out"
)
MANY_GRAPHS_PLANNED = (
    "%d graphs were planned so far, which took %.0f%% of the time since the plan was applied: every new "
    "shape, and every new value of a Python number that the forward reads, is a graph of its own. Pad "
    "batches to a few lengths (pad_to_multiple_of=64, say), and pass numbers that change as tensors"
)
WEIGHTS_CHANGED = (
    "weights have changed since this block of autocast began: eager PyTorch would go on with its casts of "
    "the old weights, a plan casts the new ones. Begin a new block in each step"
)
VIEW_USED = (
    "the loss uses a view of '%s' that the model returns, and the model itself uses that tensor several "
    "times: the last bits of its gradient can differ from eager's. Return a copy of the view (`.clone()`), "
    "or make the view outside of the model"
)
CAST_OUTSIDE = (
    "the loss uses '%s' outside of the model, too, cast to another dtype: in one block of autocast, eager "
    "casts it once and adds up all its gradients in that dtype, so that the last bits can differ. Compute "
    "this part of the loss in the model's forward, or in another block of autocast"
)
PROFILER_IS_ON = (
    "a profiler is on, so that the bytes that the loop makes between the forward and the backward pass "
    "cannot be measured: they are counted from the first step on that runs without it"
)
IN_OWN_LOOP = {
    PROFILER_IS_ON: ". Pass `loss=` the function that your loop uses, to have it counted now",
}
"""What else to do in a loop of one's own."""
IN_LOOP_OF_OTHERS = {
    PROFILER_IS_ON: ". Begin to profile after the first step, or leave as much free with %s",
}
"""What to do where others have the loop; the value is how they reserve bytes."""


class LoopOwner(NamedTuple):
    """Who has the loop where no `loss=` can be given, how to reserve bytes there, and the words before it."""

    name: str
    reserve: str
    how: str

    def first_step(self, nbytes: int) -> str:
        """What to type, to have `nbytes` free in the first step, too."""
        return f"{self.how} {self.reserve}{nbytes} for the first step, if that matters"


TRAINER = LoopOwner("trainer", "reserve=", "give Lowtide a")
SCRIPT = LoopOwner("script", "--reserve ", "add")
BYPASSED = (
    "the model got gradients, but %s, so that the budget is not kept: call model(...) itself, not "
    "model.forward(...), and not from inside of torch.compile"
)
COPIED = "a copy of a planned model trains without a plan: apply one to it with plan.apply(copy)"
SAVED = (
    "a planned model was saved without its plan: save the plan with plan.save(path), and apply it after "
    "loading"
)
