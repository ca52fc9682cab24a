"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence

from engine import messages
from engine.text.tokenizer import Tokenizer
from loraplex.openai.replies import CompletionLogprobs, TokenLogprob, TopLogprob

LEAST = -9999.0
"""What OpenAI says for "next to impossible"; JSON has no infinity."""


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[messages.TokenLogprob]
) -> list[TokenLogprob]:
    """Return the entries of `logprobs.content`."""
    return [
        TokenLogprob(
            token=tokenizer.token_text(token.token_id),
            logprob=max(token.logprob, LEAST),
            bytes=list(tokenizer.token_bytes(token.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=tokenizer.token_text(token_id),
                    logprob=max(logprob, LEAST),
                    bytes=list(tokenizer.token_bytes(token_id)),
                )
                for token_id, logprob in token.top
            ],
        )
        for token in tokens
    ]


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[messages.TokenLogprob], offset: int
) -> CompletionLogprobs:
    """Return the four lists; `offset` is where these tokens' text begins in the completion.

    `top_logprobs` always has the drawn token. Of tokens with the same text the likelier stays.
    """
    texts = [tokenizer.token_text(token.token_id) for token in tokens]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[max(token.logprob, LEAST) for token in tokens],
        top_logprobs=[_top(tokenizer, token) for token in tokens],
        text_offset=offsets,
    )


def _top(tokenizer: Tokenizer, token: messages.TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        found.setdefault(tokenizer.token_text(token_id), max(logprob, LEAST))
    return found
