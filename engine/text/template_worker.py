"""Renders chat templates of tenants, one after another, in a process of its own that may die.

`python -m engine.text.template_worker` reads jobs from stdin and writes answers to stdout, each as
four bytes of length (little endian) and JSON. The first answer comes unasked and says that it is
ready. A job that needs more than `MEMORY_BYTES` of address space or `CPU_SECONDS` kills the
process, and `engine.text.template_renderer` starts another. The sandbox of `ChatTemplate` limits
what templates can do; this limits how much of it.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from engine.text.chat_template import ChatTemplate
from engine.text.errors import ChatTemplateError

MEMORY_BYTES = 512 << 20
CPU_SECONDS = 1.0
MAX_TEXT_CHARS = 8 << 20
LENGTH_BYTES = 4
MAX_TEMPLATES = 16
"""Compiled ones that are kept: compiling takes longer than rendering."""


def main() -> None:
    """Answer jobs until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The default action, not a Python handler, which would wait until C code returns.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the service
    templates = Templates()
    _write({"ready": True})
    while head := sys.stdin.buffer.read(LENGTH_BYTES):
        job = json.loads(sys.stdin.buffer.read(int.from_bytes(head, "little")))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = answer(job, templates)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(reply)


class Templates:
    """The last templates that were compiled, by source and special tokens."""

    def __init__(self) -> None:
        self._compiled = lru_cache(MAX_TEMPLATES)(self._compile)

    def of(self, job: Mapping[str, Any]) -> ChatTemplate:
        """The job's template; raises what compiling raises."""
        return self._compiled(job["source"], tuple(job["special_tokens"].items()))

    def _compile(self, source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
        return ChatTemplate(source, dict(special_tokens))


def answer(job: Mapping[str, Any], templates: Templates) -> dict[str, Any]:
    """Compile the job's `source` and, with `messages`, render it: `text`, or `code` and `message`.

    Without messages the answer says whether the template `takes_tools`.
    """
    try:
        template = templates.of(job)
        if "messages" not in job:
            return {"takes_tools": template.takes_tools}
        text = template.render(job["messages"], **job["options"])
    except ChatTemplateError as error:
        return {"code": error.code, "message": error.message}
    except (MemoryError, RecursionError, ValueError, OverflowError) as error:
        message = f"the chat template cannot be compiled: {type(error).__name__}"
        return {"code": "invalid_chat_template", "message": message}
    if len(text) > MAX_TEXT_CHARS:
        message = f"the chat template makes a prompt of {len(text)} characters"
        return {"code": "invalid_messages", "message": message}
    return {"text": text}


def _write(reply: Mapping[str, Any]) -> None:
    data = json.dumps(reply).encode()
    sys.stdout.buffer.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
