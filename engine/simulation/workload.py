"""Requests as simulations send them: (arrival, request), drawn from distributions or replayed."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.simulation.lengths import Lengths
from engine.simulation.popularity import Popularity

Arrival = tuple[float, EngineRequest]
"""Seconds since the start, and what is sent."""


class TraceError(ValueError):
    """A line of a trace is not a request; the message names the line."""


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request of a replayed trace."""

    at: float
    """Seconds since the trace's start."""
    prompt_tokens: int
    output_tokens: int
    tenant: str = "t0"
    adapter: str | None = None


class Drawn(NamedTuple):
    """A request as it was drawn, before its prompt is made."""

    at: float
    number: int
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str
    adapter: str | None

    def request(self) -> EngineRequest:
        """The request as it is sent."""
        return simulated_request(
            self.number, self.num_prompt_tokens, self.num_output_tokens,
            tenant=self.tenant, adapter=self.adapter,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests by distributions. Adapter `a<k>` belongs to tenant `t<k modulo num_tenants>`.

    `arrivals(random)` is a stream of times. Without `popularity` all is for the base model, of
    tenants in turn.
    """

    arrivals: Callable[[Random], Iterator[float]]
    prompts: Lengths
    outputs: Lengths
    num_requests: int
    popularity: Popularity | None = None
    num_tenants: int = 1

    def requests(self, seed: int) -> Iterator[Arrival]:
        """The same for the same seed; times, lengths and adapters are drawn independently."""
        return ((drawn.at, drawn.request()) for drawn in self.draws(seed))

    def draws(self, seed: int) -> "Iterator[Drawn]":
        """The same requests, before their prompts are made."""
        times, lengths, adapters = (
            _random(seed, part) for part in ("arrivals", "lengths", "adapters")
        )
        arrivals = itertools.islice(self.arrivals(times), self.num_requests)
        for number, at in enumerate(arrivals):
            prompt, output = self.prompts.draw(lengths), self.outputs.draw(lengths)
            key = number if self.popularity is None else self.popularity.draw(adapters)
            tenant = f"t{key % self.num_tenants}"
            adapter = None if self.popularity is None else f"a{key}"
            yield Drawn(at, number, prompt, output, tenant, adapter)


def replay(path: Path) -> list[Arrival]:
    """The requests of a JSONL file, one `TraceLine` each, in the order of time.

    Raises TraceError for a line that is none, OSError for a file that cannot be read.
    """
    decode = msgspec.json.Decoder(TraceLine).decode
    lines: list[TraceLine] = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = decode(text)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        for field in ("prompt_tokens", "output_tokens"):
            if getattr(line, field) < 1:
                raise TraceError(f"{path}:{number}: {field} must be at least 1")
        if line.at < 0:
            raise TraceError(f"{path}:{number}: at must be at least 0")
        lines.append(line)
    return _numbered(sorted(lines, key=lambda line: line.at))


def simulated_request(
    number: int, prompt: int, output: int, *, tenant: str = "t0", adapter: str | None = None
) -> EngineRequest:
    """A request of `prompt` tokens whose reply has exactly `output` tokens if nothing cuts it."""
    return EngineRequest(
        request_id=number,
        tenant=tenant,
        adapter=adapter,
        prompt_token_ids=[1] * prompt,
        sampling=SamplingParams(max_tokens=output, seed=0, ignore_eos=True),
    )


def _random(seed: int, part: str) -> Random:
    return Random(f"{seed} {part}")  # noqa: S311


def _numbered(lines: Iterable[TraceLine]) -> list[Arrival]:
    return [
        (
            line.at,
            simulated_request(
                number, line.prompt_tokens, line.output_tokens,
                tenant=line.tenant, adapter=line.adapter,
            ),
        )
        for number, line in enumerate(lines)
    ]  # fmt: skip
