"""Where measured time holds what no prediction counts."""

from lowtide.checking.clock import Timing

LEAST_SHARE = 0.03
"""Of a step's time: less is lost in what any machine is off by."""


def fault_note(without: Timing | None, with_plan: Timing | None) -> str:
    """Empty where page faults are next to nothing, with and without the plan, or nobody counted them."""
    if without is None or with_plan is None:
        return ""
    if max(without.fault_share, with_plan.fault_share) < LEAST_SHARE:
        return ""
    return (
        "taking memory from the system anew is part of the measured time and of no prediction: "
        f"{without.median_page_faults:,} page faults in a step without the plan and "
        f"{with_plan.median_page_faults:,} with it, about {without.fault_share:.0%} and "
        f"{with_plan.fault_share:.0%} of the time. The page on measuring says how to keep that memory"
    )
