"""Steps as columns, and whose tokens they computed."""

from collections.abc import Sequence

from adapter_store.model_ref import BASE_NAME
from engine.telemetry.labels import name_of
from engine.telemetry.records import StepRecord
from loraplex.dashboard.engine_views import Steps, StepShare

MAX_STEPS = 240
MAX_NAMED = 11
"""Adapters with a column of their own."""

_Name = tuple[str | None, str | None]
_OTHERS: _Name = (None, None)


def steps_view(steps: Sequence[StepRecord], tenant: str | None) -> Steps:
    """The steps as a viewer may see them: what is another tenant's has no name."""
    return Steps(
        at=[step.at for step in steps],
        rows=[step.num_rows for step in steps],
        adapters=[step.adapters for step in steps],
        running=[step.running for step in steps],
        waiting=[step.waiting for step in steps],
        schedule_seconds=[step.seconds.schedule for step in steps],
        prepare_seconds=[step.seconds.prepare for step in steps],
        forward_seconds=[step.seconds.forward + step.seconds.lora for step in steps],
        lora_seconds=[step.seconds.lora for step in steps],
        sample_seconds=[step.seconds.sample for step in steps],
        post_seconds=[step.seconds.post for step in steps],
        shares=_shares(steps, tenant),
    )


def _shares(steps: Sequence[StepRecord], tenant: str | None) -> list[StepShare]:
    columns: dict[_Name, tuple[list[int], list[int]]] = {}
    for number, step in enumerate(steps):
        for share in step.shares:
            name = _name(share.tenant, share.label, tenant)
            if name not in columns:
                columns[name] = [0] * len(steps), [0] * len(steps)
            prefill, decode = columns[name]
            prefill[number] += share.prefill_tokens
            decode[number] += share.decode_rows
    by_size = sorted(
        (name for name in columns if name != _OTHERS),
        key=lambda name: -sum(map(sum, columns[name])),
    )
    rest = [columns[name] for name in (*by_size[MAX_NAMED:], _OTHERS) if name in columns]
    shares = [StepShare(*name, *columns[name]) for name in by_size[:MAX_NAMED]]
    if rest:
        prefill, decode = (
            [sum(values) for values in zip(*(column[part] for column in rest), strict=True)]
            for part in (0, 1)
        )
        shares.append(StepShare(*_OTHERS, prefill, decode))
    return shares


def _name(owner: str, label: str | None, tenant: str | None) -> _Name:
    """Tenant and adapter. An admin sees the base as one, whichever tenant used it."""
    if not owner or tenant not in (None, owner):
        return _OTHERS
    if label is None:
        return tenant, BASE_NAME
    return owner, name_of(label)
