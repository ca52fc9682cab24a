"""Versions with a chat template, stop tokens and sampling of their own, over HTTP."""

import json
from pathlib import Path
from typing import Any

import anyio.to_thread
import openai
import pytest
from click.testing import CliRunner

from loraplex.cli import main
from tests.support.fake_engine import info
from tests.support.service import TestService, adapter_files, running_service

pytestmark = pytest.mark.anyio

HELLO: Any = [{"role": "user", "content": "Hello world"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
OWN = {
    "chat_template": TEMPLATE,
    "stop_tokens": json.dumps(["<|im_end|>"]),
    "defaults": json.dumps({"temperature": 0.25, "top_k": 7}),
}


def prompt_text(service: TestService, number: int) -> str:
    ids = service.engine.requests[number].prompt_token_ids
    return service.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture
async def service(tmp_path):
    async with running_service(tmp_path) as running:
        running.engine.info = info(max_model_len=256)
        running.engine.script = lambda request: running.tokenizer.encode("ok", False)
        yield running


async def test_chat_is_rendered_stopped_and_sampled_as_the_version_says(service):
    await service.upload("legal", **OWN)
    async with service.openai() as client:
        await client.chat.completions.create(model="legal", messages=HELLO)
        await client.chat.completions.create(model="base", messages=HELLO)
        await client.chat.completions.create(
            model="legal", messages=HELLO, temperature=0,
            extra_body={"stop_token_ids": [5]},
        )  # fmt: skip
        await client.completions.create(model="legal", prompt="Hello", top_p=0.5)
    first, base, other, completion = (service.engine.requests[n].sampling for n in (1, 2, 3, 4))
    assert prompt_text(service, 1) == "<user>Hello world<|im_end|>"
    assert "<|im_start|>user" in prompt_text(service, 2)
    stop = service.tokenizer.token_id("<|im_end|>")
    assert (first.temperature, first.top_k) == (0.25, 7)
    assert first.stop_token_ids == (stop,)
    assert (base.temperature, base.top_k, base.stop_token_ids) == (1.0, 0, ())
    assert (other.temperature, other.top_k) == (0.0, 7)
    assert other.stop_token_ids == (5, stop)
    assert (completion.temperature, completion.top_p) == (0.25, 0.5)


async def test_equal_files_with_another_template_are_a_new_version_and_shown(service):
    first = await service.upload("legal", **OWN)
    assert (await service.upload("legal", **OWN))["unchanged"]
    second = await service.upload("legal")
    assert (first["version"], second["version"]) == (1, 2)
    async with service.client("acme:tenant") as client:
        newest, oldest = (await client.get("/v1/adapters/legal/versions")).json()["data"]
    assert oldest["chat_template"] == TEMPLATE
    assert oldest["stop_tokens"] == ["<|im_end|>"]
    assert oldest["defaults"] == {"temperature": 0.25, "top_k": 7}
    assert (newest["chat_template"], newest["stop_tokens"], newest["defaults"]) == (None, [], {})


UNUSABLE = [
    ("chat_template", "{% for %}", "invalid_chat_template"),
    ("chat_template", "x" * 70_000, "upload_too_large"),
    ("stop_tokens", "<|im_end|>", "invalid_value"),
    ("stop_tokens", '["no such token"]', "invalid_value"),
    ("stop_tokens", json.dumps(["<|im_end|>"] * 17), "invalid_value"),
    ("defaults", "[]", "invalid_value"),
    ("defaults", '{"temperature": 3}', "invalid_value"),
    ("defaults", '{"seed": 3}', "invalid_value"),
    ("defaults", '{"top_k": 1.5}', "invalid_value"),
]


async def test_a_part_that_cannot_be_used_is_refused_by_its_name(service):
    config, weights = adapter_files()
    async with service.client("acme:tenant") as client:
        for part, value, code in UNUSABLE:
            reply = await client.post(
                "/v1/adapters", data={"name": "legal", part: value},
                files={"config": ("c", config), "weights": ("w", weights)},
            )  # fmt: skip
            error = reply.json()["error"]
            assert (reply.status_code // 100, error["param"], error["code"]) == (4, part, code)
        assert (await client.get("/v1/adapters/legal")).status_code == 404


async def test_a_template_that_takes_too_much_is_the_callers_error_and_stops_nobody(service):
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    await service.upload("slow", chat_template=loops)
    async with service.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="slow", messages=HELLO)
        assert caught.value.code == "chat_template_failed"
        await client.chat.completions.create(model="base", messages=HELLO)


async def test_a_template_that_refuses_the_messages_says_why(service):
    await service.upload("strict", chat_template="{{ raise_exception('no user role') }}")
    async with service.openai() as client:
        with pytest.raises(openai.BadRequestError, match="no user role") as caught:
            await client.chat.completions.create(model="strict", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("invalid_messages", "messages")


async def test_a_template_in_a_request_is_refused(service):
    async with service.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="base", messages=HELLO, extra_body={"chat_template": "{{ 1 }}"}
            )
    assert caught.value.param == "chat_template"


async def test_tools_need_a_template_that_shows_them(service):
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    await service.upload("plain", chat_template=TEMPLATE)
    async with service.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="plain", messages=HELLO, tools=tools, tool_choice="required"
            )
    assert caught.value.code == "tools_not_supported"


async def test_tokenize_counts_with_the_versions_template(service):
    await service.upload("legal", **OWN)
    async with service.client() as client:
        asked = {"model": "legal", "messages": HELLO}
        counted = (await client.post("/tokenize", json=asked)).json()
        await client.post("/v1/chat/completions", json=asked)
    assert counted["tokens"] == service.engine.requests[1].prompt_token_ids


async def test_the_command_line_says_what_a_name_means_after_a_push(service, tmp_path):
    options = ["--url", service.url, "--api-key", service.keys["acme:tenant"]]

    async def told(name: str, seed: int, *flags: str) -> str:
        folder = adapter_folder(tmp_path / str(seed), seed)
        arguments = ["adapters", "push", name, str(folder), *flags, *options]
        result = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(main, arguments))
        assert result.exit_code == 0, result.output
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(f"{name}@"))
        return line.rpartition("; ")[2]

    assert await told("cli", 1, "--no-publish") == "cli means no version yet"
    assert await told("cli", 2) == "cli now means @2"
    assert await told("cli", 3, "--no-publish") == "cli still means @2"


def adapter_folder(folder: Path, seed: int = 0) -> Path:
    config, weights = adapter_files(seed)
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


async def test_the_command_line_sends_what_it_is_told(service, tmp_path):
    folder = adapter_folder(tmp_path / "adapter")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    arguments = [
        "adapters", "push", "legal", str(folder), "--json",
        "--chat-template", str(tmp_path / "template.jinja"),
        "--stop-token", "<|im_end|>", "--sampling", '{"top_k": 7}',
        "--url", service.url, "--api-key", service.keys["acme:tenant"],
    ]  # fmt: skip
    result = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(main, arguments))
    assert result.exit_code == 0, result.output
    shown = await service.registry.get_version("acme", "legal", 1)
    assert shown.serving.chat_template == TEMPLATE
    assert shown.serving.stop_tokens == ("<|im_end|>",)
    assert shown.serving.sampling == {"top_k": 7}
