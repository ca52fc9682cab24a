"""How one request samples: the knobs that travel with it from the API to the sampler."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Validated sampling parameters of one request.

    The service checks ranges before it builds one (a 4xx names the field); the engine trusts them.
    Stop *strings* are not here: text belongs to the front end (`engine.text`).
    """

    max_tokens: int
    """Output tokens at most, per choice; at least 1."""
    seed: int
    """Drives the counter-based noise; the service draws one where the client gave none."""
    n: int = 1
    """Choices: one prefill, then `n` sequences."""
    min_tokens: int = 0
    """EOS and stop ids are masked until this many output tokens exist."""
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, as in transformers."""
    presence_penalty: float = 0.0
    """Over the output only, as in OpenAI's API."""
    frequency_penalty: float = 0.0
    """Over the output only, as in OpenAI's API."""
    logit_bias: dict[int, float] = {}
    """Added to the raw logits, by vocabulary id."""
    stop_token_ids: tuple[int, ...] = ()
    """End the choice with reason `stop`; the stop token itself is the last of its output."""
    ignore_eos: bool = False
    """Keep going past the model's EOS ids (not past `stop_token_ids`)."""
    grammar: str | None = None
    """The output is a text of this grammar (`engine.grammar`); EOS only where such a text ends."""
    logprobs: int | None = None
    """None: none. k >= 0: the sampled token's log-probability and the k most likely ones."""

    @property
    def reads_history(self) -> bool:
        """Whether a draw depends on which tokens came before, other than through the model."""
        return (
            self.grammar is not None
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
