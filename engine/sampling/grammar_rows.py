"""Rows whose output follows a grammar, as every sampler treats them."""

from engine.grammar.grammars import GrammarError, Grammars
from engine.scheduled_batch import SampledRow, SamplingRow


def follow_grammar(grammars: Grammars | None, row: SamplingRow) -> SampledRow | None:
    """Move the row's cursor over its output so far; None once the mask of the next token is set.

    Otherwise the row is not drawn in this step, and this is its result: deferred while the grammar
    is being compiled, else an error. `row.grammar` is not None.
    """
    if row.grammar is None:
        raise ValueError("the row follows no grammar")
    if grammars is None:
        return SampledRow(error="the engine has no tokenizer to follow a grammar with")
    try:
        is_ready = grammars.follow(row.grammar, row.token_ids[row.num_prompt_tokens :])
    except GrammarError as error:
        return SampledRow(error=str(error), error_code="grammar_failed")
    return None if is_ready else SampledRow(is_deferred=True)
