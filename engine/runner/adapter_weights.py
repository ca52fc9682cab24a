"""Reads one adapter into host memory, fused and rounded as the model runs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapter_store.base_model import EMBEDDING, OUTPUT_LAYER, BaseModel
from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE
from adapter_store.errors import AdapterFormatError
from adapter_store.peft_format import Binding, InspectedAdapter, inspect_adapter
from engine.errors import AdapterUnavailable
from engine.models.own_weights import OwnWeights
from engine.models.projections import (
    OUTPUT_PROJECTION,
    SPLIT_PROJECTIONS,
    LayerProjections,
    ProjectionKey,
    ProjectionSpec,
    iter_projections,
    module_path,
)
from engine.quantization.scheme import Scheme
from engine.runner.base_weights import adapted_row_norms, read_base_bias
from engine.runner.tensor_file import TensorFile
from lora_kernels import ColumnAffine, EmbeddingLora, LoraSlice
from lora_kernels.cpu_kernels import TORCH_KERNELS
from lora_kernels.device_kernels import Kernels, Weights


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One adapter's tensors, ready for a slot."""

    digest: str
    rank: int
    """The largest over its modules."""
    projections: Mapping[ProjectionKey, Weights]
    """Only those that the adapter has weights for."""
    nbytes: int
    affines: Mapping[ProjectionKey, ColumnAffine] = field(default_factory=dict[Any, Any])
    """For projections that DoRA or trained biases change as well."""
    embedding: EmbeddingLora | None = None
    own: OwnWeights | None = None
    """Weights that replace the base's."""

    @property
    def is_uncommon(self) -> bool:
        """Whether it has more than low-rank updates of the layers' projections."""
        return (
            bool(self.affines)
            or self.embedding is not None
            or self.own is not None
            or OUTPUT_PROJECTION in self.projections
        )


def load_adapter(
    folder: Path,
    digest: str,
    base: BaseModel,
    *,
    max_rank: int,
    dtype: torch.dtype,
    max_full_values: int | None = None,
    projections: LayerProjections = SPLIT_PROJECTIONS,
    kernels: Kernels = TORCH_KERNELS,
    scheme: Scheme | None = None,
) -> AdapterWeights:
    """Read an adapter's folder; safe on any thread.

    Before a tensor is used, the files are checked as at their upload, and must hash to `digest`.
    Values are rounded to the model's `dtype` and fused into its `projections`, for its `kernels`.
    `scheme` says how the base is quantised; `max_rank` and `max_full_values` are passed to
    `inspect_adapter`. Raises AdapterUnavailable.
    """
    weights_file = folder / WEIGHTS_FILE
    try:
        config = (folder / CONFIG_FILE).read_bytes()
        inspected = inspect_adapter(
            config, weights_file, base, max_rank=max_rank, max_full_values=max_full_values
        )
        if inspected.digest != digest:
            raise AdapterUnavailable(digest, f"its files hash to {inspected.digest[:12]}")
        source = _Source(inspected, TensorFile(weights_file), base, dtype, scheme)
        slots = list(iter_projections(base.num_layers, projections))
        embedding, own = source.embedding(), source.own()
        fused = {
            key: kernels.fuse(slices, dtype)
            for key, spec in slots
            if any(slices := source.slices(key, spec))
        }
        affines = {
            key: affine for key, spec in slots if (affine := source.affine(key, spec)) is not None
        }
        source.check_all_taken()
    except AdapterFormatError as error:
        raise AdapterUnavailable(digest, f"{error.code}: {error.message}") from error
    except OSError as error:
        raise AdapterUnavailable(digest, f"its files cannot be read: {error}") from error
    return AdapterWeights(
        digest=digest,
        rank=max(binding.rank for binding in inspected.bindings),
        projections=fused,
        nbytes=sum(
            part.nbytes for part in (*fused.values(), *affines.values(), embedding, own) if part
        ),
        affines=affines,
        embedding=embedding,
        own=own,
    )


class _Source:
    """Reads an adapter's tensors for one projection after the other."""

    def __init__(
        self,
        inspected: InspectedAdapter,
        file: TensorFile,
        base: BaseModel,
        dtype: torch.dtype,
        scheme: Scheme | None,
    ) -> None:
        self._bindings = {binding.module: binding for binding in inspected.bindings}
        self._biases = inspected.biases
        self._saved = inspected.saved
        self._tensors = inspected.tensors
        self._file = file
        self._base = base
        self._dtype = dtype
        self._scheme = scheme
        self._taken: set[str] = set()

    def slices(self, key: ProjectionKey, spec: ProjectionSpec) -> list[LoraSlice | None]:
        bindings = [self._bindings.get(module_path(key.layer, name)) for name in spec.members]
        return [None if binding is None else self._read(binding) for binding in bindings]

    def affine(self, key: ProjectionKey, spec: ProjectionSpec) -> ColumnAffine | None:
        modules = [module_path(key.layer, member) for member in spec.members]
        parts = [self._member_affine(module) for module in modules]
        if not any(parts):
            return None
        shapes = {**self._base.linears, **self._base.ends}
        sizes = [shapes[module].out_features for module in modules]
        return ColumnAffine(
            _joined([part and part.scale for part in parts], sizes, torch.ones),
            _joined([part and part.shift for part in parts], sizes, torch.zeros),
        )

    def embedding(self) -> EmbeddingLora | None:
        binding = self._bindings.get(EMBEDDING)
        if binding is None:
            return None
        part = self._read(binding)
        a, b = (tensor.to(self._dtype).to(torch.float32) for tensor in (part.a, part.b))
        return EmbeddingLora(a.T.contiguous(), b.contiguous(), part.scaling)

    def own(self) -> OwnWeights | None:
        if not self._saved:
            return None
        # Copied, or a step would read the file's pages from disk.
        weights: dict[str, Tensor] = {
            module: self._tensor(key).to(self._dtype, copy=True)
            for module, key in self._saved.items()
        }
        ends = weights.pop(EMBEDDING, None), weights.pop(OUTPUT_LAYER, None)
        return OwnWeights(weights, *ends)

    def check_all_taken(self) -> None:
        left = {*self._bindings, *self._biases} - self._taken
        if left:
            raise AdapterFormatError("foreign_tensor", f"the model has no place for '{min(left)}'")

    def _read(self, binding: Binding) -> LoraSlice:
        self._taken.add(binding.module)
        a, b = self._tensor(binding.a_key), self._tensor(binding.b_key)
        return LoraSlice(a, b, binding.scaling)

    def _member_affine(self, module: str) -> ColumnAffine | None:
        """The scale and shift that turn the projection's output into PEFT's.

        PEFT computes ``m (W x + s B A x) + b' + s β`` with DoRA's factor m, the trained bias b'
        (or else the base's bias b) and the bias β of B. The projection computed
        ``W x + s B A x + b``.
        """
        binding, bias_key = self._bindings.get(module), self._biases.get(module)
        magnitude_key = None if binding is None else binding.magnitude_key
        scale = shift = None
        if binding is not None and magnitude_key is not None:
            # The output layer is never quantised.
            scheme = self._scheme if module in self._base.linears else None
            norms = adapted_row_norms(self._base, module, self._read(binding), self._dtype, scheme)
            scale = self._vector(magnitude_key) / norms
        if scale is not None or bias_key is not None:
            base_bias = read_base_bias(self._base, module, self._dtype)
            if base_bias is not None:
                self._taken.add(module)
                bias = base_bias if bias_key is None else self._vector(bias_key)
                shift = bias - (base_bias if scale is None else scale * base_bias)
        if binding is not None and binding.b_bias_key is not None:
            added = self._vector(binding.b_bias_key) * binding.scaling
            shift = added if shift is None else shift + added
        return None if scale is None and shift is None else ColumnAffine(scale, shift)

    def _vector(self, key: str) -> Tensor:
        return self._tensor(key).to(torch.float32)

    def _tensor(self, key: str) -> Tensor:
        return self._file.tensor(self._tensors[key])


def _joined(
    parts: Sequence[Tensor | None], sizes: Sequence[int], fill: Callable[[int], Tensor]
) -> Tensor | None:
    if all(part is None for part in parts):
        return None
    filled = (fill(size) if part is None else part for part, size in zip(parts, sizes, strict=True))
    return torch.cat(list(filled))
