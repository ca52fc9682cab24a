"""What was found in an adapter: the report a user gets with an upload."""

import msgspec


class BoundModules(msgspec.Struct, frozen=True):
    """Modules of one kind that share rank and scaling, in the given layers (`0-5,7`)."""

    module: str
    layers: str
    count: int
    rank: int
    scaling: float


class IgnoredTensors(msgspec.Struct, frozen=True):
    """Tensors that change nothing, why, and the first of their keys."""

    reason: str
    count: int
    sample: str


class BaseMatch(msgspec.Struct, frozen=True):
    """The base model that serves the adapter, and the one that its config names.

    `same_name` compares the last parts of the two names; every shape has been compared in any case.
    """

    name: str
    fingerprint: str
    declared: str | None
    same_name: bool | None


class ConformanceReport(msgspec.Struct, frozen=True):
    """An adapter that is served exactly as PEFT computes it.

    `bytes` is the size of the weights file, `rank` the largest rank of a module, `nesting` what
    stood before `layers.N` in the tensor keys. `no_op` means that every module's product B A is
    zero, so that the adapter answers as the base does.
    """

    digest: str
    bytes: int
    rank: int
    num_modules: int
    modules: list[BoundModules]
    scalings: list[float]
    dtypes: list[str]
    nesting: str
    no_op: bool
    base_match: BaseMatch
    ignored: list[IgnoredTensors] = []
    warnings: list[str] = []
