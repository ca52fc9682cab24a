"""What a token of a prefill costs a step, by its context.

A step's budget is in tokens, but what others wait for is time. The linears take as long for any
token; attention takes longer the more tokens stand before it. So a token with a context of c costs

    max(1, (K + c) / (K + K / 4))

where K is the context at which its attention takes as long as its linears. Up to a quarter of K a
token is a token; beyond, a chunk has fewer of them, and takes no longer than one that ends there.
It has a block of them nevertheless: the linears take about as long for one token as for a block.
"""


def tokens_within(budget: int, context: int, attention_context: int | None, block_size: int) -> int:
    """Tokens from position `context` on that cost at most `budget`, or a block if fewer do.

    `budget` is at least 1, and no more tokens than it says are returned. `attention_context` is K;
    None: every token costs 1.
    """
    if attention_context is None:
        return budget
    fitting = budget * 5 * attention_context // (4 * (attention_context + context))
    return min(budget, max(block_size, fitting))


def cost_of(num_tokens: int, context: int, attention_context: int | None) -> int:
    """What `num_tokens` from position `context` on cost, rounded up."""
    if attention_context is None:
        return num_tokens
    cost = -(-num_tokens * 4 * (attention_context + context) // (5 * attention_context))
    return max(num_tokens, cost)
