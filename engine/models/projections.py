"""The decoder's projections: which of the checkpoint's linears are fused into one."""

from collections.abc import Iterator
from typing import NamedTuple


class ProjectionSpec(NamedTuple):
    """One projection of every layer; its members share their input."""

    name: str
    members: tuple[str, ...]
    """Module paths within a layer; each is a slice of the output, in this order."""


class LayerProjections(NamedTuple):
    """The projections of a layer, each named as its field here."""

    qkv: ProjectionSpec
    out: ProjectionSpec
    gate_up: ProjectionSpec
    down: ProjectionSpec


_OUT = ProjectionSpec("out", ("self_attn.o_proj",))
_DOWN = ProjectionSpec("down", ("mlp.down_proj",))

SPLIT_PROJECTIONS = LayerProjections(
    ProjectionSpec("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    _OUT,
    ProjectionSpec("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
    _DOWN,
)
"""Checkpoints with a linear each for q, k, v, gate and up."""

FUSED_PROJECTIONS = LayerProjections(
    ProjectionSpec("qkv", ("self_attn.qkv_proj",)),
    _OUT,
    ProjectionSpec("gate_up", ("mlp.gate_up_proj",)),
    _DOWN,
)
"""Checkpoints that fuse them themselves: an adapter has one A, and one B over all rows."""


class ProjectionKey(NamedTuple):
    """One projection of one layer."""

    layer: int
    name: str


OUTPUT_PROJECTION = ProjectionKey(-1, "lm_head")
"""The output layer, which belongs to no layer and has one member."""


def module_path(layer: int, member: str) -> str:
    """Hugging Face's path of a member, such as `model.layers.3.self_attn.q_proj`."""
    if layer == OUTPUT_PROJECTION.layer:
        return member
    return f"model.layers.{layer}.{member}"


def iter_projections(
    num_layers: int, projections: LayerProjections
) -> Iterator[tuple[ProjectionKey, ProjectionSpec]]:
    """Every projection of a decoder, the output layer last."""
    for layer in range(num_layers):
        for spec in projections:
            yield ProjectionKey(layer, spec.name), spec
    yield OUTPUT_PROJECTION, ProjectionSpec(OUTPUT_PROJECTION.name, (OUTPUT_PROJECTION.name,))
