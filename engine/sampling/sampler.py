"""Draws the next token of every row of a step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.grammar.grammars import Grammars
from engine.ops import DecoderOps, Draw, TorchOps
from engine.sampling.adjustments import adjust_logits, has_adjustments
from engine.sampling.filters import Candidates, min_p_, scale_by_temperature, top_k_top_p
from engine.sampling.grammar_rows import follow_grammar
from engine.sampling.logprobs import sampled_tokens
from engine.sampling.noise import exponential_noise, stream_key
from engine.sampling.rules import has_nucleus, is_greedy, problem_of
from engine.scheduled_batch import SampledRow, SampledToken, SamplingRow

_TABLE_SIZES = (256, 4096)  # best scores that top-k and top-p try before they sort them all
_CPU_CHUNK = 1 << 17  # elements worked on at once: a few rows, so that temporaries stay in cache
_DEVICE_CHUNK = 1 << 24


class Sampler:
    """Turns logits into tokens, each row on its own: neighbours never change a row's result.

    A row's pipeline, in transformers' order: bias, penalties, mask of `min_tokens`
    (`adjustments`), mask of its grammar (`engine.grammar`); then greedy, or temperature, top-k,
    top-p, min-p (`filters`) and a race of counter-based noise (`noise`). Every operation that is
    used here on several rows gives a row the same bits as on that row alone. Of equal scores,
    greedy takes the lowest id.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        ops: DecoderOps | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`ops` choose and draw, by default PyTorch's.

        Without `grammars`, rows that have one fail.
        """
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._ops = ops or TorchOps()
        self._grammars = grammars

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """Draw a token for each choice of each row.

        `logits`: [num_rows, vocab_size], float32 or bfloat16, row i belongs to `rows[i]`; not
        changed. A row that cannot be sampled (logits that are not finite, parameters out of range)
        gets an `error`; the others are not touched by it. Raises ValueError for another shape.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(
                f"logits have the shape {tuple(logits.shape)}, "
                f"expected ({len(rows)}, {self._vocab_size})"
            )
        results: dict[int, SampledRow] = {}
        draws: list[Draw] = []
        others: list[int] = []
        for index, (row, best) in enumerate(zip(rows, self._ops.argmax(logits), strict=True)):
            problem = problem_of(row.params) if best >= 0 else "its logits are not finite"
            if problem is not None:
                results[index] = SampledRow(error=problem)
            elif row.grammar is not None:
                held = follow_grammar(self._grammars, row)
                if held is None:
                    others.append(index)
                else:
                    results[index] = held
            elif row.params.logprobs is not None or has_adjustments(row):
                others.append(index)
            elif is_greedy(row.params):
                results[index] = _without_logprobs([best] * len(row.choices))
            elif has_nucleus(row.params, self._vocab_size):
                others.append(index)
            else:
                draws += _draws_of(row, index, best)
        drawn = self._draw_from_all(logits, draws)
        results.update((index, _without_logprobs(ids)) for index, ids in drawn.items())
        for chunk in self._chunks(others, logits.device.type):
            results.update(self._sample_chunk(logits, rows, chunk))
        return [results[index] for index in range(len(rows))]

    def _chunks(self, indices: list[int], device_type: str) -> list[list[int]]:
        budget = _CPU_CHUNK if device_type == "cpu" else _DEVICE_CHUNK
        size = max(1, budget // self._vocab_size)
        return [indices[start : start + size] for start in range(0, len(indices), size)]

    def _sample_chunk(
        self, logits: Tensor, rows: Sequence[SamplingRow], indices: list[int]
    ) -> dict[int, SampledRow]:
        try:
            drawn = self._sample_rows(_select(logits, indices), [rows[index] for index in indices])
        except Exception as error:
            if len(indices) == 1:
                return {indices[0]: SampledRow(error=f"{type(error).__name__}: {error}")}
            # One of them is at fault. Sampled alone, the others get the same tokens as together.
            results: dict[int, SampledRow] = {}
            for index in indices:
                results.update(self._sample_chunk(logits, rows, [index]))
            return results
        return dict(zip(indices, drawn, strict=True))

    def _sample_rows(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        logprobs = torch.log_softmax(_select(logits, wanted).float(), dim=-1) if wanted else None
        scores = logits.to(torch.float32, copy=True)
        for row_scores, row in zip(scores, rows, strict=True):
            adjust_logits(row_scores, row, self._eos_token_ids)
            if row.grammar is not None and row.grammar.mask is not None:
                allowed = torch.from_numpy(row.grammar.mask).to(row_scores.device)
                row_scores.masked_fill_(~allowed, -math.inf)
        best = scores.argmax(dim=-1, keepdim=True)
        if not torch.isfinite(scores.gather(1, best)).all():
            raise ValueError("no token is left to draw, or an adjustment overflowed")

        token_ids: dict[int, list[int]] = {}
        draws: list[Draw] = []
        narrow: list[int] = []
        for index, (row, (best_id,)) in enumerate(zip(rows, best.tolist(), strict=True)):
            if is_greedy(row.params):
                token_ids[index] = [best_id] * len(row.choices)
            elif has_nucleus(row.params, self._vocab_size):
                narrow.append(index)
            else:
                draws += _draws_of(row, index, best_id)
        token_ids.update(self._draw_from_all(scores, draws))
        if narrow:
            drawn = _draw_from_nucleus(_select(scores, narrow), [rows[index] for index in narrow])
            token_ids.update(zip(narrow, drawn, strict=True))

        results = [_without_logprobs(token_ids[index]) for index in range(len(rows))]
        if logprobs is not None:
            for row_logprobs, index in zip(logprobs, wanted, strict=True):
                num_top = rows[index].params.logprobs or 0
                results[index] = SampledRow(sampled_tokens(row_logprobs, token_ids[index], num_top))
        return results

    def _draw_from_all(self, logits: Tensor, draws: Sequence[Draw]) -> dict[int, list[int]]:
        drawn: dict[int, list[int]] = {}
        if draws:
            for draw, token_id in zip(draws, self._ops.draw(logits, draws), strict=True):
                drawn.setdefault(draw.row, []).append(token_id)
        return drawn


def _draw_from_nucleus(scores: Tensor, rows: Sequence[SamplingRow]) -> list[list[int]]:
    """Draw a token for each choice of rows with top-k or top-p; `scores` [num_rows, vocab_size]."""
    scores = scale_by_temperature(scores, _column(scores, [row.params.temperature for row in rows]))
    drawn: dict[int, list[int]] = {}
    pending = list(range(len(rows)))
    for table_size in (*_TABLE_SIZES, scores.shape[1]):
        if not pending:
            break
        nucleus = top_k_top_p(
            _select(scores, pending),
            torch.tensor([rows[index].params.top_k for index in pending], device=scores.device),
            _column(scores, [rows[index].params.top_p for index in pending]),
            table_size,
        )
        is_complete: list[bool] = nucleus.is_complete.tolist()
        done = [place for place, complete in enumerate(is_complete) if complete]
        if done:
            candidates = Candidates(*(_select(part, done) for part in nucleus.candidates))
            drawn.update(_race(candidates, rows, [pending[place] for place in done]))
        pending = [
            index for index, complete in zip(pending, is_complete, strict=True) if not complete
        ]
    return [drawn[index] for index in range(len(rows))]


def _race(
    candidates: Candidates, rows: Sequence[SamplingRow], indices: list[int]
) -> dict[int, list[int]]:
    """Draw for the rows at `indices`, whose candidates are given in that order."""
    scores, token_ids = candidates
    min_p = [rows[index].params.min_p for index in indices]
    if any(min_p):
        min_p_(scores, _column(scores, min_p))
    weights = scores.exp()
    draws = [
        (place, stream_key(rows[index].params.seed, choice, rows[index].output_position))
        for place, index in enumerate(indices)
        for choice in rows[index].choices
    ]
    places = [place for place, _ in draws]
    token_ids = _select(token_ids, places)
    times = exponential_noise([key for _, key in draws], token_ids) / _select(weights, places)
    winners = times.argmin(dim=-1, keepdim=True)
    drawn: dict[int, list[int]] = {index: [] for index in indices}
    for place, token_id in zip(
        places, token_ids.gather(1, winners).squeeze(1).tolist(), strict=True
    ):
        drawn[indices[place]].append(token_id)
    return drawn


def _draws_of(row: SamplingRow, index: int, best: int) -> list[Draw]:
    params = row.params
    return [
        Draw(
            index,
            best,
            stream_key(params.seed, choice, row.output_position),
            params.temperature,
            params.min_p,
        )
        for choice in row.choices
    ]


def _select(rows: Tensor, indices: list[int]) -> Tensor:
    if indices == list(range(rows.shape[0])):
        return rows
    return rows[torch.tensor(indices, device=rows.device)]


def _column(like: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def _without_logprobs(token_ids: list[int]) -> SampledRow:
    return SampledRow(tuple(SampledToken(token_id) for token_id in token_ids))
