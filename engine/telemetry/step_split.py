"""A step's time by part, from what the step loop and the runner have clocked."""

from engine.scheduled_batch import RunSeconds
from engine.telemetry.records import StepSeconds


def split_step(schedule: float, run: float, post: float, parts: RunSeconds | None) -> StepSeconds:
    """`run` seconds in all between plan and commit, of which the runner knows the `parts`.

    What it does not know, and all of it where it has no clock, counts as the forward pass.
    """
    if parts is None:
        return StepSeconds(schedule, 0.0, run, 0.0, 0.0, post)
    forward = max(0.0, run - parts.prepare - parts.lora - parts.sample)
    return StepSeconds(schedule, parts.prepare, forward, parts.lora, parts.sample, post)
