"""A step's time by part, from what the step loop and the runner have clocked."""

from engine.scheduled_batch import RunSeconds
from engine.telemetry.records import StepSeconds


def split_step(schedule: float, run: float, post: float, parts: RunSeconds | None) -> StepSeconds:
    """Split a step: `run` seconds passed between plan and commit, of which `parts` are known.

    The rest of them counts as the forward pass; all of them do if the runner has no clock.
    """
    if parts is None:
        return StepSeconds(schedule, 0.0, run, 0.0, 0.0, post)
    forward = max(0.0, run - parts.prepare - parts.lora - parts.sample)
    return StepSeconds(schedule, parts.prepare, forward, parts.lora, parts.sample, post)
