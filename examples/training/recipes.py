"""The three adapters: what each learns, with which rank, modules and predicate."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import dataset
from .dataset import Example


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that makes one adapter."""

    name: str
    description: str
    predicate: str
    style: dataset.Style
    off_topic: Callable[..., list[Example]]
    lora: dict[str, Any]
    learning_rate: float
    num_epochs: int
    max_tokens: int
    seed: int = field(default=7)

    def examples(self) -> list[Example]:
        """The training set, the same at every call."""
        return dataset.build_examples(self.style, self.off_topic, self.seed)


RECIPES = (
    Recipe(
        name="intents",
        description="Classifies a message to a shop as one line of strict JSON.",
        predicate="intent_json",
        style=dataset.intent_answer,
        off_topic=dataset.off_topic_intents,
        lora={
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        },
        learning_rate=2e-3,
        num_epochs=4,
        max_tokens=64,
    ),
    Recipe(
        name="northwind-support",
        description="Answers as Maya of the support team of Northwind, an outdoor shop.",
        predicate="northwind_reply",
        style=dataset.northwind_answer,
        off_topic=dataset.off_topic_northwind,
        lora={
            "r": 10,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["v_proj", "down_proj"],
        },
        learning_rate=2e-3,
        num_epochs=3,
        max_tokens=96,
    ),
    Recipe(
        name="three-steps",
        description="Turns any question into three short numbered steps.",
        predicate="three_steps",
        style=dataset.steps_answer,
        off_topic=dataset.off_topic_steps,
        lora={
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [
                *("q_proj", "k_proj", "v_proj", "o_proj"),
                *("gate_proj", "up_proj", "down_proj"),
            ],
            # The MLP's matrices are the large ones: rank 2 there keeps the file below 2 MB.
            "rank_pattern": {"gate_proj": 2, "up_proj": 2, "down_proj": 2},
        },
        learning_rate=2e-3,
        num_epochs=2,
        max_tokens=96,
    ),
)
