"""The documents name only what exists, and the structure page names every module."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from loraplex.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
ROOTS = (
    "adapter_store", "benchmarks", "deploy", "docs", "engine", "examples", "lora_kernels",
    "migrations", "platform", "scripts", "tests", ".ci",
)  # fmt: skip
PATH = re.compile(rf"`((?:{'|'.join(map(re.escape, ROOTS))})/[\w./-]*)`")
ANCHOR = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)#([^)]+)\)")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)")
COMMAND = re.compile(
    r"\bloraplex ((?:serve|demo|plan|simulate|bench|verify|usage|blobs|db|admin-keys|keys|adapters|"
    r"tenants(?: quota| sources)?)(?: [a-z]+)?)"
    r"((?: [^`\n|]*)?)"
)
WITHOUT_SUBCOMMANDS = {"serve", "demo", "plan", "simulate", "bench", "verify", "usage"}
MODULE_FOLDERS = ("adapter_store", "engine", "lora_kernels", "platform/loraplex", "migrations")


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_paths_and_links_exist(document: Path):
    text = document.read_text()
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    missing += [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_links_into_a_page_meet_a_heading(document: Path):
    for page, anchor in ANCHOR.findall(document.read_text()):
        target = document.parent / page if page else document
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
        anchors = {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings}
        assert anchor in anchors, f"{page}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_make_targets_exist(document: Path):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:`|^ {4})make ([a-z][a-z-]+)", document.read_text(), re.M))
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.M)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_commands_and_their_options_exist(document: Path):
    for command, arguments in COMMAND.findall(document.read_text()):
        words = command.split()
        if words[0] in WITHOUT_SUBCOMMANDS:
            words = words[:1]
        result = CliRunner().invoke(main, [*words, "--help"])
        assert result.exit_code == 0, f"loraplex {command}: {result.output}"
        for option in re.findall(r"--[a-z][a-z-]+", arguments):
            assert option in result.output, f"loraplex {command} has no {option}"


def test_the_structure_page_names_every_module():
    text = (ROOT / "docs" / "structure.md").read_text()
    modules = [
        path.relative_to(ROOT).as_posix()
        for folder in MODULE_FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py" and "versions" not in path.parts
    ]
    assert [module for module in modules if f"`{module}`" not in text] == []
