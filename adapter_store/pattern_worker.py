"""Match the regular expressions of an adapter's config, in a process that can be stopped.

PEFT matches with Python's `re`, whose time has no bound, and no other engine has quite its rules.
So the patterns of an upload run here under a limit of CPU time and memory. Run as a script with
`-I -S`; it imports nothing but a few modules of the standard library.
"""

import json
import re
import resource
import sys
from typing import Literal, TypedDict

CPU_SECONDS = 1
MEMORY_BYTES = 512 << 20

Mode = Literal["match", "fullmatch"]


class Request(TypedDict):
    """Expressions as (mode, pattern), and the names to try each on."""

    expressions: list[tuple[Mode, str]]
    names: list[str]


class Response(TypedDict):
    """For each expression the names it matches, and the text of its group `idx` or None.

    `invalid` is the index of the first expression that does not compile; then there is no result.
    """

    matches: list[dict[str, str | None]]
    invalid: int | None


def match_all(request: Request) -> Response:
    """Try every expression on every name."""
    matches: list[dict[str, str | None]] = []
    for index, (mode, pattern) in enumerate(request["expressions"]):
        try:
            compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError):
            return {"matches": [], "invalid": index}
        attempt = compiled.match if mode == "match" else compiled.fullmatch
        found = ((name, attempt(name)) for name in request["names"])
        matches.append({name: match.groupdict().get("idx") for name, match in found if match})
    return {"matches": matches, "invalid": None}


def main() -> None:
    """Read a request from stdin, and write the response to stdout."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    json.dump(match_all(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
