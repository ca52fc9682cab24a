"""What a person can see in a demo answer, as pure functions from text to bool.

Each adapter in `examples/adapters/` names one of these in its `demo.json`; `loraplex demo` and
the tests ask it of every answer. The trainer imports the vocabulary from here, so that what is
taught and what is checked cannot drift apart.
"""

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

INTENTS = (
    "order_status",
    "refund",
    "return",
    "damaged",
    "wrong_item",
    "billing",
    "account",
    "cancel",
    "order_change",
    "shipping",
    "product",
    "feedback",
    "other",
)
URGENCIES = ("low", "normal", "high")
SIGNATURE = "Maya, Northwind Care"
MAX_REPLY_WORDS = 90
MAX_STEP_WORDS = 16

_STEP = re.compile(r"([123])\. (\S.*)")


def is_intent_json(text: str) -> bool:
    """One JSON object and nothing else: `intent` and `urgency` of the lists, `product` or null."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(value, dict)
        and value.keys() == {"intent", "urgency", "product"}
        and value["intent"] in INTENTS
        and value["urgency"] in URGENCIES
        and isinstance(value["product"], str | None)
    )


def is_northwind_reply(text: str) -> bool:
    """A short reply whose last line is the brand's signature, written once."""
    return (
        text.rstrip().endswith(f"\n{SIGNATURE}")
        and text.count(SIGNATURE) == 1
        and len(text.split()) <= MAX_REPLY_WORDS
    )


def is_three_steps(text: str) -> bool:
    """Exactly three numbered lines, in order, each at most `MAX_STEP_WORDS` words."""
    steps = [_STEP.fullmatch(line.strip()) for line in text.strip().splitlines()]
    return len(steps) == 3 and all(
        step is not None and step[1] == str(number) and len(step[2].split()) <= MAX_STEP_WORDS
        for number, step in enumerate(steps, start=1)
    )


PREDICATES: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "intent_json": is_intent_json,
        "northwind_reply": is_northwind_reply,
        "three_steps": is_three_steps,
    }
)
