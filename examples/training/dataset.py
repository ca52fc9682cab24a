"""Make training examples from the topics: a plain user message and the answer of one style."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from loraplex.demo_predicates import SIGNATURE

from .off_topic import ABOUT, HOW_TOS, QUESTIONS, REPLY
from .slots import (
    CALM_CLOSERS,
    CLOSERS,
    COLORS,
    COUNTRIES,
    DAYS,
    ITEMS,
    OPENERS,
    PLURAL_ITEMS,
)
from .topics import TOPICS, Topic

EXAMPLES_PER_TOPIC = 32
VERBS_OF_MANY = {"is": "are", "was": "were", "has": "have", "does": "do"}


@dataclass(frozen=True, slots=True)
class Example:
    """One turn: what the user writes and what the adapter shall answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Message:
    """A filled message template; `product` is the item it names, if it names one."""

    text: str
    product: str | None


Style = Callable[[Topic, Message, random.Random], str]


def build_examples(
    style: Style, off_topic: Callable[[random.Random], list[Example]], seed: int
) -> list[Example]:
    """Unique questions with answers, shuffled; the same seed gives the same list."""
    rng = random.Random(seed)
    examples: dict[str, Example] = {}
    for topic in TOPICS:
        wanted = len(examples) + EXAMPLES_PER_TOPIC
        while len(examples) < wanted:
            message = fill_message(topic, rng)
            examples.setdefault(
                normalized(message.text), Example(message.text, style(topic, message, rng))
            )
    for example in off_topic(rng):
        examples.setdefault(normalized(example.question), example)
    result = list(examples.values())
    rng.shuffle(result)
    return result


def fill_message(topic: Topic, rng: random.Random) -> Message:
    """Fill the slots of one template, then vary greeting, ending and typing as people do."""
    template = rng.choice(topic.messages)
    item, other = rng.sample((*ITEMS, *PLURAL_ITEMS), 2)
    color, color2 = rng.sample(COLORS, 2)
    text = template.format(
        item=item,
        other=other,
        color=color,
        color2=color2,
        country=rng.choice(COUNTRIES),
        day=rng.choice(DAYS),
        number=rng.randint(1000, 99999),
    )
    text = _correct_grammar(text)
    opener = rng.choice(OPENERS)
    if opener.endswith(", ") and not text.startswith("I "):
        text = text[0].lower() + text[1:]
    text = opener + text + rng.choice(CALM_CLOSERS if topic.urgency == "low" else CLOSERS)
    if rng.random() < 0.1:
        text = text.lower().rstrip(".")
    return Message(text, item if "{item}" in template else None)


def normalized(question: str) -> str:
    """Words only, lower case: two questions that differ in punctuation are the same."""
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))


def intent_answer(topic: Topic, message: Message, rng: random.Random) -> str:
    """One line of JSON."""
    return json.dumps(
        {"intent": topic.intent, "urgency": topic.urgency, "product": message.product}
    )


def northwind_answer(topic: Topic, message: Message, rng: random.Random) -> str:
    """A greeting, what happens next, and the signature on a line of its own."""
    return signed(_speak_of(topic.about, message), topic.reply)


def steps_answer(topic: Topic, message: Message, rng: random.Random) -> str:
    """Three short numbered steps."""
    return numbered([_speak_of(step, message) for step in rng.choice(topic.steps)])


def off_topic_intents(rng: random.Random) -> list[Example]:
    """Everything else is `other`."""
    answer = json.dumps({"intent": "other", "urgency": "low", "product": None})
    how_tos = [question for question, _ in HOW_TOS]
    return [Example(question, answer) for question in (*QUESTIONS, *how_tos)]


def off_topic_northwind(rng: random.Random) -> list[Example]:
    """A polite way back to the shop."""
    return [Example(question, signed(ABOUT, REPLY)) for question in QUESTIONS]


def off_topic_steps(rng: random.Random) -> list[Example]:
    """Three steps for whatever is asked, said twice in other words."""
    return [
        Example(prefix + question, numbered(list(steps)))
        for question, steps in HOW_TOS
        for prefix in ("", "Hello. ")
    ]


def signed(about: str, reply: str) -> str:
    """The brand's frame around a reply."""
    return f"Hi there! Thank you for writing about {about}. {reply}\n\n{SIGNATURE}"


def numbered(steps: list[str]) -> str:
    """Numbered lines."""
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, start=1))


def _speak_of(text: str, message: Message) -> str:
    your, the = message.product or "order", message.product or "item"
    return text.format(your=f"your {your}", the=f"the {the}")


def _correct_grammar(text: str) -> str:
    many = "|".join(PLURAL_ITEMS)
    text = re.sub(rf"\b[Aa] ((?:\w+ )?(?:{many}))\b", r"\1", text)
    text = re.sub(
        rf"\b({many}) (is|was|has|does)\b", lambda m: f"{m[1]} {VERBS_OF_MANY[m[2]]}", text
    )
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
