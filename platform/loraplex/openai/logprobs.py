"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Callable, Sequence

from engine import messages
from engine.text.tokenizer import Tokenizer
from loraplex.openai.replies import CompletionLogprobs, TokenLogprob, TopLogprob

TokenName = Callable[[int], str]
"""What a token is called in log-probabilities."""

LEAST = -9999.0
"""What OpenAI says for "next to impossible"; JSON has no infinity."""


def token_name(tokenizer: Tokenizer, *, as_ids: bool) -> TokenName:
    """Return how tokens are called: by their text, or as `token_id:N`, which is unambiguous."""
    return (lambda token_id: f"token_id:{token_id}") if as_ids else tokenizer.token_text


def chat_logprobs(
    tokenizer: Tokenizer, name: TokenName, tokens: Sequence[messages.TokenLogprob]
) -> list[TokenLogprob]:
    """Return the entries of `logprobs.content`."""
    return [
        TokenLogprob(
            token=name(token.token_id),
            logprob=max(token.logprob, LEAST),
            bytes=list(tokenizer.token_bytes(token.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=name(token_id),
                    logprob=max(logprob, LEAST),
                    bytes=list(tokenizer.token_bytes(token_id)),
                )
                for token_id, logprob in token.top
            ],
        )
        for token in tokens
    ]


def completion_logprobs(
    tokenizer: Tokenizer, name: TokenName, tokens: Sequence[messages.TokenLogprob], offset: int
) -> CompletionLogprobs:
    """Return the four lists; `offset` is where these tokens' text begins in the completion.

    `top_logprobs` always has the drawn token. Of tokens with the same name the likelier stays.
    """
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(tokenizer.token_text(token.token_id))
    return CompletionLogprobs(
        tokens=[name(token.token_id) for token in tokens],
        token_logprobs=[max(token.logprob, LEAST) for token in tokens],
        top_logprobs=[_top(name, token) for token in tokens],
        text_offset=offsets,
    )


def _top(name: TokenName, token: messages.TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        found.setdefault(name(token_id), max(logprob, LEAST))
    return found
