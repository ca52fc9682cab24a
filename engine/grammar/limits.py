"""How much work one grammar may make: the same where it is checked and where it is used."""

import llguidance


def parser_limits() -> llguidance.LLParserLimits:
    """llguidance's limits: a second to compile at most, some 20 ms for a mask.

    The lexer's states are what takes memory: 100 bytes each, measured, for a long bounded string.
    """
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=100_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
