"""The service on a real engine core that says random things, held to its grammars."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from engine.config import SchedulerConfig
from engine.grammar.grammars import Grammars
from engine.runner.protocol import Runner
from engine.sampling.sampler import Sampler
from engine.transport.inline_client import InlineEngineClient
from tests.support.random_runner import RandomRunner
from tests.support.scripted_engine import EOS, VOCAB_SIZE, ScriptedRunner, scripted_parts
from tests.support.service import TestService, running_service
from tests.support.tiny_tokenizers import HERMES, write_byte_level_folder


@contextlib.asynccontextmanager
async def grammar_service(
    root: Path, *, says: str | None = None, chat_template: str = HERMES
) -> AsyncIterator[TestService]:
    """With `says` the model says that text; otherwise whatever its grammar lets random logits."""
    folder = write_byte_level_folder(root / "engine")
    grammars = Grammars.from_pretrained(folder, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    assert grammars is not None
    reply: list[int] = []
    runner: Runner
    if says is None:
        runner = RandomRunner(Sampler(VOCAB_SIZE, [EOS], grammars=grammars), VOCAB_SIZE)
    else:

        def script(prompt: tuple[int, ...], adapter: str | None) -> Sequence[int]:
            return reply

        runner = ScriptedRunner(script)
    config = SchedulerConfig(num_kv_blocks=512, max_num_seqs=16, max_model_len=1500)
    parts = scripted_parts(runner, root / "cache", config=config, prepare_grammar=grammars.prepare)

    async def no_adapter(digest: str) -> None:
        raise AssertionError("nothing was uploaded")

    async with (
        InlineEngineClient(parts, no_adapter) as engine,
        running_service(root, engine, chat_template=chat_template) as service,
    ):
        reply += service.tokenizer.encode(says or "", add_special_tokens=False)
        yield service
