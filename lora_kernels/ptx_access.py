"""Reads from a kernel's PTX how wide its accesses to global memory are, array by array."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"')
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s")
_ACCESS = re.compile(r"\b(?:ld|st)\.global(?:\.[a-zA-Z_0-9:]+?)*?(?:\.v(\d))?\.[a-z]+(\d+)\s")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S*\s+\[[^]]*\],\s*\[[^]]*\],\s*(\w+)")
# The kernels name the pointers of a tile p_<array>; other accesses read single numbers of the
# tile map, of a slot's record or of the permutation.
_TILE = re.compile(r"tl\.(?:load|store)\(p_([a-z]+)\b")


@dataclass(frozen=True, slots=True)
class Access:
    """One instruction that reads or writes a tile."""

    name: str
    """The array: x, a, b, t or y."""
    num_bytes: int
    line: int

    def __str__(self) -> str:
        return f"an access of {self.num_bytes} bytes to {self.name} (line {self.line})"


def read_accesses(ptx: str) -> list[Access]:
    """Accesses to tiles, each traced by the PTX's line table to the source line that made it."""
    files: dict[str, str] = {
        found[1]: found[2] for line in ptx.splitlines() if (found := _FILE.match(line))
    }
    accesses: list[Access] = []
    source: tuple[str, int] | None = None
    locations_in_asm: int | None = None
    for line in ptx.splitlines():
        if line.strip() in ("// begin inline asm", "// end inline asm"):
            locations_in_asm = 0 if "begin" in line else None
        elif (loc := _LOC.match(line)) is not None:
            if locations_in_asm is not None:
                locations_in_asm += 1
                # Each line of inline assembly counts one up from the location of its first.
                if locations_in_asm > 1:
                    continue
            source = (loc[1], int(loc[2]))
        num_bytes = _bytes_of(line)
        if num_bytes is None or source is None:
            continue
        name = _array(files[source[0]], source[1])
        if name is not None:
            accesses.append(Access(name, num_bytes, source[1]))
    return accesses


def _bytes_of(line: str) -> int | None:
    if (copy := _COPY.search(line)) is not None:
        return int(copy[1], 0)
    if (access := _ACCESS.search(line)) is not None:
        return int(access[1] or 1) * int(access[2]) // 8
    return None


def _array(path: str, line: int) -> str | None:
    found = _TILE.search(_source_lines(path)[line - 1])
    return found[1] if found else None


@cache
def _source_lines(path: str) -> tuple[str, ...]:
    return tuple(Path(path).read_text().splitlines())
