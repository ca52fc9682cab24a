"""Ask models questions through the official client, streaming, all at once."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import openai


@dataclass(slots=True)
class Answer:
    """One streamed answer, filled in while it arrives."""

    model: str
    question: str
    text: str = ""
    num_tokens: int = 0
    ttft_seconds: float | None = None
    decode_seconds: float = 0.0
    """First token to last."""
    queue: dict[str, float] | None = None
    """Milliseconds in the queue by cause, as the service tells it."""
    done: bool = False
    error: str | None = None

    @property
    def queue_ms(self) -> float | None:
        """In the queue, over all causes."""
        return None if self.queue is None else sum(self.queue.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Output rate after the first token."""
        if self.num_tokens < 2 or self.decode_seconds <= 0:
            return None
        return (self.num_tokens - 1) / self.decode_seconds


@dataclass(frozen=True, slots=True)
class Asker:
    """One column of the demo: a model name, and the key of the tenant that asks."""

    model: str
    tenant: str
    key: str


async def ask_all(
    url: str, askers: Sequence[Asker], answers: Sequence[Sequence[Answer]], *,
    max_tokens: int, on_change: Callable[[], None],
) -> None:  # fmt: skip
    """Fill `answers[question][asker]`, every request in flight at the same time."""
    clients = [
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=asker.key, max_retries=0, timeout=600)
        for asker in askers
    ]
    try:
        await asyncio.gather(
            *(
                _ask(client, answer, max_tokens, on_change)
                for row in answers
                for client, answer in zip(clients, row, strict=True)
            )
        )
    finally:
        for client in clients:
            await client.close()


async def _ask(
    client: openai.AsyncOpenAI, answer: Answer, max_tokens: int, on_change: Callable[[], None]
) -> None:
    start = time.perf_counter()
    first = last = None
    try:
        stream = await client.chat.completions.create(
            model=answer.model,
            messages=[{"role": "user", "content": answer.question}],
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            now = time.perf_counter()
            if chunk.choices and chunk.choices[0].delta.content:
                first, last = first or now, now
                answer.ttft_seconds = first - start
                answer.text += chunk.choices[0].delta.content
                on_change()
            if chunk.usage:
                answer.num_tokens = chunk.usage.completion_tokens
            timing = (chunk.model_extra or {}).get("loraplex")
            if timing:
                answer.queue = timing["queue"]
    except openai.OpenAIError as error:
        answer.error = str(error)
    if first is not None and last is not None:
        answer.decode_seconds = last - first
    answer.done = True
    on_change()
