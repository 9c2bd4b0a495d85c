"""Checks for anyone's Target, Drafter or DraftPolicy: does it keep its Protocol's contract?

    from spec_core.conformance import check_target
    check_target(my_target)  # raises ConformanceError, which names every check that failed

Each check compares with something independent: a state that was only ever given the kept tokens,
a row that is alone, a forward of single steps.
"""

from spec_core.conformance._findings import ConformanceError, Finding
from spec_core.conformance.drafter import DRAFTER_CHECKS, check_drafter, drafter_findings
from spec_core.conformance.policy import POLICY_CHECKS, check_policy, policy_findings
from spec_core.conformance.target import TARGET_CHECKS, check_target, target_findings

__all__ = [
    "DRAFTER_CHECKS",
    "POLICY_CHECKS",
    "TARGET_CHECKS",
    "ConformanceError",
    "Finding",
    "check_drafter",
    "check_policy",
    "check_target",
    "drafter_findings",
    "policy_findings",
    "target_findings",
]
