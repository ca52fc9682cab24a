"""What was found in an adapter: the report a user gets with an upload."""

from collections.abc import Iterable

import msgspec


class BoundModules(msgspec.Struct, frozen=True):
    """Modules of one kind that share rank and scaling, in the given layers (`0-5,7`).

    The embedding and the output layer are in none: `layers` is then empty.
    """

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
    zero, so that the adapter answers as the base does. `features` says what there is beside LoRA
    of the layers' linears: `bias`, `dora`, `embedding`, `lm_head`, `lora_bias`, `modules_to_save`.
    `full_weights` are the modules whose weight is the adapter's own (`input_layernorm of 0-5`),
    `full_values` the values of such an embedding and output layer together.
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
    features: list[str] = []
    full_weights: list[str] = []
    full_values: int = 0


def group_modules(modules: Iterable[tuple[str, int, float]]) -> list[BoundModules]:
    """Group (path, rank, scaling) of modules over their layers; others go by their last name."""
    layers: dict[tuple[str, int, float], list[int]] = {}
    for path, rank, scaling in modules:
        if not path.startswith("model.layers."):
            layers[path.rpartition(".")[2], rank, scaling] = []
            continue
        _, _, layer, kind = path.split(".", 3)
        layers.setdefault((kind, rank, scaling), []).append(int(layer))
    return [
        BoundModules(kind, _ranges(numbers), len(numbers) or 1, rank, scaling)
        for (kind, rank, scaling), numbers in sorted(layers.items())
    ]


def group_paths(modules: Iterable[str]) -> list[str]:
    """Group paths of modules over their layers, as `input_layernorm of 0-5`."""
    groups = group_modules((module, 0, 1.0) for module in modules)
    return [f"{g.module} of {g.layers}" if g.layers else g.module for g in groups]


def _ranges(numbers: Iterable[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
