"""A tiny model with its runner, adapters and PEFT references, for tests of the engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE, hash_files
from engine.runner.adapter_weights import AdapterWeights
from engine.runner.build_runner import BuiltRunner, build_runner
from tests.support.hand_driver import GreedySampler, HandDriver, HandSequence
from tests.support.peft_reference import PeftReference
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_adapter, make_tiny_model

NUM_BLOCKS = 96


def prompt_of(length: int, seed: int = 3) -> list[int]:
    return [(seed + 7 * i + i * i) % VOCAB_SIZE for i in range(length)]


def digest_of(folder: Path) -> str:
    return hash_files((folder / CONFIG_FILE).read_bytes(), folder / WEIGHTS_FILE)


class ModelLab:
    """One model and one runner; adapters are made once a name."""

    def __init__(
        self,
        folder: Path,
        family: str,
        *,
        dtype: str = "float32",
        max_model_len: int | None = None,
        quantization: str | None = None,
        **overrides: Any,
    ) -> None:
        self._folder = folder
        self.model_dir = folder / "base"
        if not self.model_dir.exists():
            make_tiny_model(self.model_dir, family, **overrides)
        self.sampler = GreedySampler()
        self.built: BuiltRunner = build_runner(
            self.model_dir,
            dtype=dtype,
            num_kv_blocks=NUM_BLOCKS,
            max_loras=4,
            max_model_len=max_model_len,
            self_test=False,
            quantization=quantization,
            make_sampler=lambda vocab_size, eos: self.sampler,
        )
        self._references: dict[Path | None, PeftReference] = {}

    @property
    def runner(self):
        return self.built.runner

    def driver(self) -> HandDriver:
        return HandDriver(self.runner, self.sampler, NUM_BLOCKS)

    def check_alone_as_in_a_crowd(self, requests: Sequence[tuple[int, int | None]]) -> None:
        """A request, a prompt's length and a slot, has the same bits whatever shares its batch."""

        def run(requests: Sequence[tuple[int, int | None]], chunk: int) -> list[HandSequence]:
            driver = self.driver()
            sequences = [driver.add(prompt_of(n, seed=n), slot) for n, slot in requests]
            driver.generate(sequences, 10, chunk=chunk)
            return sequences

        for crowded, request in zip(run(requests, 23), requests, strict=True):
            [alone] = run([request], 90)
            assert alone.output == crowded.output
            assert torch.equal(torch.stack(alone.logits), torch.stack(crowded.logits))

    def adapter(self, name: str, **config: Any) -> Path:
        folder = self._folder / name
        if not folder.exists():
            make_tiny_adapter(folder, self.model_dir, **config)
        return folder

    def load(self, folder: Path) -> AdapterWeights:
        return self.built.load_adapter(digest_of(folder), folder)

    def install(self, slot: int, folder: Path) -> AdapterWeights:
        weights = self.load(folder)
        self.runner.install_adapter(slot, weights)
        return weights

    def reference(self, adapter: Path | None = None) -> PeftReference:
        if adapter not in self._references:
            self._references[adapter] = PeftReference(self.model_dir, adapter)
        return self._references[adapter]
