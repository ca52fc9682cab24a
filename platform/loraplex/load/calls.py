"""Calls to come, from the same distributions and traces that simulations use."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from engine.simulation.workload import Arrival

Api = Literal["completions", "chat"]

_TOKEN_IDS = (100, 8000)
"""Prompts are drawn from these: past what is special, and within any vocabulary."""
_WORDS = (
    "parcel", "letter", "garden", "winter", "table", "station", "river", "market",
    "window", "engine", "paper", "harbour", "morning", "doctor", "yellow", "street",
    "kitchen", "number", "forest", "teacher", "picture", "summer", "bridge", "island",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One streamed request, and when it is due: seconds since the start of its run."""

    at: float
    tenant: str
    model: str
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How requests of a workload become calls of an endpoint."""

    api: Api = "completions"
    """Completions get token ids, so that prompts have exactly as many as were drawn; chats get
    words, about one for each token."""
    model: str
    """Asked for where a request names no adapter."""
    adapters: Sequence[str] = ()
    """Names of the adapters `a0`, `a1` ... of a drawn workload; a trace's names are sent as is."""
    is_exact: bool = True
    """Ask for exactly so many tokens; fields that vLLM and we know, but not OpenAI."""

    def calls(self, arrivals: Iterable[Arrival], seed: int) -> Iterator[Call]:
        """The calls of these requests, in their order."""
        random = Random(f"{seed} prompts")  # noqa: S311
        names = {f"a{number}": name for number, name in enumerate(self.adapters)}
        for at, request in arrivals:
            adapter = request.adapter
            model = self.model if adapter is None else names.get(adapter, adapter)
            num_output = request.sampling.max_tokens
            prompt = self._prompt(len(request.prompt_token_ids), random)
            path = "completions" if self.api == "completions" else "chat/completions"
            yield Call(at, request.tenant, model, path, self._body(model, prompt, num_output))

    def _prompt(self, num_tokens: int, random: Random) -> dict[str, Any]:
        # One random prefix, so that no two prompts share cached blocks, and a cheap rest.
        if self.api == "completions":
            start = random.randrange(*_TOKEN_IDS)
            return {"prompt": [start, *_cycle(num_tokens - 1, start)]}
        start = random.randrange(10**6)
        words = [f"{start}", *(_WORDS[(start + k) % len(_WORDS)] for k in range(num_tokens - 1))]
        return {"messages": [{"role": "user", "content": " ".join(words)}]}

    def _body(self, model: str, prompt: dict[str, Any], num_output: int) -> dict[str, Any]:
        body = {
            "model": model, **prompt, "max_tokens": num_output, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self.is_exact:
            body |= {"min_tokens": num_output, "ignore_eos": True}
        return body


def _cycle(num_tokens: int, start: int) -> Iterator[int]:
    low, high = _TOKEN_IDS
    return (low + (start * 31 + 7 * k) % (high - low) for k in range(num_tokens))
