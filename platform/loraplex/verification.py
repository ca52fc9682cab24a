"""Proves that an adapter is served as PEFT computes it, in float32, on this machine.

Each module is compared alone and inside a mixed batch, and so are whole greedy replies. The mixed
batch also holds rows of the base model and of a second adapter, the first one's mirror image.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapter_store.base_model import EMBEDDING, read_base_model
from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE
from adapter_store.peft_format import inspect_adapter
from engine.models.decoder_config import read_decoder_config
from engine.models.projections import ProjectionKey, iter_projections, module_path
from engine.runner.adapter_weights import AdapterWeights
from engine.runner.build_runner import BuiltRunner, build_runner
from engine.runner.greedy_runs import GreedyRun, RecordingSampler, blocks_for, greedy_runs
from lora_kernels import ColumnAffine, EmbeddingLora, EmbeddingTable, LoraBatch, LoraSlice
from lora_kernels.device_kernels import Weights

MODULE_TOLERANCE = 1e-5
"""Largest difference of a module's output, relative to the largest output."""
LOGIT_TOLERANCE = 1e-3
"""Largest difference of a logit, relative to the largest; it grows with the depth of a model."""
UNDECIDED_GAP = 1e-4
"""Where PEFT's own two best logits are closer than this, either token is right."""
MAX_RANK = 512
NUM_ROWS = 16
ADAPTER_SLOT, MIRROR_SLOT = 0, 1
OnCompared = Callable[[str], None]
"""Hears what has been compared: a module's name, or a reply's."""
CROWD_SLOTS = (ADAPTER_SLOT, None, MIRROR_SLOT) * NUM_ROWS


class VerificationError(Exception):
    """The comparison cannot be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One comparison's largest differences from PEFT, relative to the largest value there."""

    name: str
    rank: int | None
    """None for a whole reply."""
    solo: float
    mixed: float
    tolerance: float
    tokens_agree: bool = True
    """Greedy ids are equal, alone and mixed, but for ties that PEFT itself cannot decide."""

    @property
    def share(self) -> float:
        """Its larger difference, as a share of what is allowed."""
        return max(self.solo, self.mixed) / self.tolerance

    @property
    def holds(self) -> bool:
        """Whether it is served exactly."""
        return max(self.solo, self.mixed) <= self.tolerance and self.tokens_agree


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found."""

    digest: str
    kernels: str
    modules: list[Difference]
    replies: list[Difference]

    @property
    def holds(self) -> bool:
        """Whether the adapter is served exactly."""
        return all(part.holds for part in (*self.modules, *self.replies))


def verify_adapter(
    folder: Path,
    model_dir: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 16,
    cpu_kernels: str = "auto",
    on_compared: OnCompared = lambda name: None,
) -> Verification:
    """Compare an adapter's folder, served over a base model's, with PEFT.

    Raises VerificationError without PEFT, or for a prompt that leaves no room for its reply;
    ConfigError, AdapterStoreError or OSError for a base or an adapter that cannot be served at all.
    """
    config, weights_file = (folder / CONFIG_FILE).read_bytes(), folder / WEIGHTS_FILE
    # First what needs no PEFT: it says more clearly what is wrong with a file.
    inspected = inspect_adapter(config, weights_file, read_base_model(model_dir), max_rank=MAX_RANK)
    _check_lengths(prompts, max_tokens, read_decoder_config(model_dir).max_model_len)
    rank = max(binding.rank for binding in inspected.bindings)
    reference = _PeftModel(folder, model_dir)
    sampler = RecordingSampler()
    built = build_runner(
        model_dir,
        dtype="float32",
        num_kv_blocks=blocks_for(3, max(map(len, prompts)) + max_tokens),
        max_loras=2,
        max_lora_rank=rank,
        self_test=False,
        make_sampler=lambda vocab_size, eos_token_ids: sampler,
        cpu_kernels=cpu_kernels,
    )
    weights = built.load_adapter(inspected.digest, folder)
    mirror = _mirrored(weights, built)
    built.runner.install_adapter(ADAPTER_SLOT, weights)
    built.runner.install_adapter(MIRROR_SLOT, mirror)
    with torch.inference_mode():
        return Verification(
            digest=weights.digest,
            kernels=built.kernels.name,
            modules=_compare_modules(reference, built, weights, mirror, on_compared),
            replies=[
                _compare_reply(
                    f"prompt {index}", reference, built, sampler, prompt, max_tokens, on_compared
                )
                for index, prompt in enumerate(prompts, 1)
            ],
        )


def _check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int, max_model_len: int) -> None:
    for index, prompt in enumerate(prompts, 1):
        if len(prompt) + max_tokens > max_model_len:
            raise VerificationError(
                f"prompt {index} has {len(prompt)} tokens; with a reply of {max_tokens} that is "
                f"more than the {max_model_len} that the base model serves. Ask for shorter "
                "replies (--max-tokens) or give shorter prompts"
            )


class _PeftModel:
    """transformers + PEFT in float32."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        try:
            from peft import PeftModel
        except ImportError:
            raise VerificationError(
                "PEFT is not installed, and it is what the adapter is compared with. "
                "Run: pip install 'loraplex[train]'; in a checkout: "
                ".venv/bin/python -m pip install -c constraints.txt -e '.[train]'"
            ) from None
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        with warnings.catch_warnings():
            # peft 0.21 reads an attribute that transformers 5.24 has renamed.
            warnings.simplefilter("ignore", FutureWarning)
            model = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False)
        self._model: Any = model.to(torch.float32).eval()
        inner: Any = self._model.get_base_model()
        modules: Mapping[str, Any] = dict(inner.named_modules())
        self.modules = {name: m for name, m in modules.items() if hasattr(m, "lora_A")}
        """PEFT's layers by the base's module path."""
        self.ranks: dict[str, int] = {n: max(m.r.values()) for n, m in self.modules.items()}

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> GreedyRun:
        """Recompute the whole sequence for each token: the plainest truth there is."""
        token_ids: list[int] = []
        rows: list[Tensor] = []
        for _ in range(max_tokens):
            inputs = torch.tensor([[*prompt, *token_ids]])
            rows.append(self._model(input_ids=inputs, use_cache=False).logits[0, -1])
            token_ids.append(int(rows[-1].argmax()))
        return GreedyRun(token_ids, torch.stack(rows))


def _mirrored(weights: AdapterWeights, built: BuiltRunner) -> AdapterWeights:
    """The adapter with every change negated: a neighbour that would show if rows got mixed up."""
    mirrored: dict[ProjectionKey, Weights] = {}
    for key, fused in weights.projections.items():
        parts = [fused.slice(index) for index in range(len(fused.slice_sizes))]
        mirrored[key] = built.kernels.fuse(
            [part and LoraSlice(part.a, part.b, -part.scaling) for part in parts], torch.float32
        )
    embedding = weights.embedding
    return replace(
        weights,
        projections=mirrored,
        affines={
            key: ColumnAffine(
                None if affine.scale is None else 2 - affine.scale,
                None if affine.shift is None else -affine.shift,
            )
            for key, affine in weights.affines.items()
        },
        embedding=embedding and replace(embedding, scaling=-embedding.scaling),
    )


def _compare_modules(
    reference: _PeftModel,
    built: BuiltRunner,
    weights: AdapterWeights,
    mirror: AdapterWeights,
    on_compared: OnCompared,
) -> list[Difference]:
    generator = torch.Generator().manual_seed(0)
    differences: list[Difference] = []
    left = dict(reference.modules)
    if weights.embedding is not None and mirror.embedding is not None and EMBEDDING in left:
        tables = (weights.embedding, mirror.embedding)
        difference = _compare_embedding(left.pop(EMBEDDING), *tables, generator)
        differences.append(replace(difference, rank=reference.ranks[EMBEDDING]))
    for key, spec in iter_projections(built.base.num_layers, built.projections):
        if key not in weights.projections:
            continue
        projection = built.runner.projections[key]
        x = torch.randn(NUM_ROWS, projection.lora.in_features, generator=generator)
        # Rows of the adapter at every other place, between the base's and the mirror's.
        crowd = torch.randn(3 * NUM_ROWS, projection.lora.in_features, generator=generator)
        crowd[::3] = x
        outputs = [
            projection(x, LoraBatch.from_runs([ADAPTER_SLOT], [NUM_ROWS])),
            projection(crowd, LoraBatch.from_runs(CROWD_SLOTS, [1] * len(CROWD_SLOTS)))[::3],
        ]
        for index, member in enumerate(spec.members):
            name = module_path(key.layer, member)
            module = left.pop(name, None)
            if module is None:
                continue
            expected = module(x)
            columns = slice(*projection.lora.slice_indptr[index : index + 2])
            solo, mixed = (_relative(output[:, columns] - expected, expected) for output in outputs)
            differences.append(
                Difference(name, reference.ranks[name], solo, mixed, MODULE_TOLERANCE)
            )
            on_compared(name)
    # What PEFT adapts and the engine does not is as wrong as can be.
    differences += [
        Difference(name, reference.ranks[name], math.inf, math.inf, MODULE_TOLERANCE)
        for name in left
    ]
    return differences


def _compare_embedding(
    module: Any, weights: EmbeddingLora, mirror: EmbeddingLora, generator: torch.Generator
) -> Difference:
    vocab_size, hidden_size = weights.a.shape[0], weights.b.shape[0]
    table = EmbeddingTable(vocab_size, hidden_size, 2)
    table.install(ADAPTER_SLOT, weights)
    table.install(MIRROR_SLOT, mirror)
    ids = torch.randint(vocab_size, (3 * NUM_ROWS,), generator=generator)
    expected: Tensor = module(ids[::3])
    # The engine scales what it has looked up after the update, as it does for the base.
    update = (expected - module.base_layer(ids[::3])) / getattr(module.base_layer, "embed_scale", 1)
    solo, crowd = torch.zeros(NUM_ROWS, hidden_size), torch.zeros(3 * NUM_ROWS, hidden_size)
    table.add_(solo, ids[::3], LoraBatch.from_runs([ADAPTER_SLOT], [NUM_ROWS]))
    table.add_(crowd, ids, LoraBatch.from_runs(CROWD_SLOTS, [1] * len(CROWD_SLOTS)))
    return Difference(
        EMBEDDING,
        None,
        _relative(solo - update, expected),
        _relative(crowd[::3] - update, expected),
        MODULE_TOLERANCE,
    )


def _relative(difference: Tensor, expected: Tensor) -> float:
    return difference.abs().max().item() / (expected.abs().max().item() or 1.0)


def _compare_reply(
    name: str,
    reference: _PeftModel,
    built: BuiltRunner,
    sampler: RecordingSampler,
    prompt: Sequence[int],
    max_tokens: int,
    on_compared: OnCompared,
) -> Difference:
    expected = reference.greedy(prompt, max_tokens)
    [solo] = greedy_runs(built.runner, sampler, [(prompt, ADAPTER_SLOT)], max_tokens)
    crowd = [(prompt, MIRROR_SLOT), (prompt, ADAPTER_SLOT), (prompt, None)]
    mixed = greedy_runs(built.runner, sampler, crowd, max_tokens)[1]
    scale = expected.logits.abs().max().item() or 1.0
    on_compared(name)
    return Difference(
        name,
        None,
        solo=_logit_difference(solo, expected) / scale,
        mixed=_logit_difference(mixed, expected) / scale,
        tolerance=LOGIT_TOLERANCE,
        tokens_agree=_agree(solo, expected) and _agree(mixed, expected),
    )


def _logit_difference(run: GreedyRun, expected: GreedyRun) -> float:
    """Up to the first token that differs: past it the two answer different texts."""
    length = next(
        (
            i
            for i, (a, b) in enumerate(zip(run.token_ids, expected.token_ids, strict=True))
            if a != b
        ),
        len(run.token_ids) - 1,
    )
    return (run.logits[: length + 1] - expected.logits[: length + 1]).abs().max().item()


def _agree(run: GreedyRun, expected: GreedyRun) -> bool:
    for position, (got, wanted) in enumerate(zip(run.token_ids, expected.token_ids, strict=True)):
        if got != wanted:
            best, second = expected.logits[position].topk(2).values.tolist()
            return best - second < UNDECIDED_GAP
    return True
