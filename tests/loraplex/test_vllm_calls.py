"""What clients written for vLLM call, and what other OpenAI clients try."""

from pathlib import Path
from typing import Any

import pytest

from adapter_store.references.policy import SourcePolicy
from adapter_store.references.sources import AdapterSources
from tests.support.service import TestService, adapter_files, running_service
from tests.support.tiny_tokenizers import HERMES

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Hello world"}]


def put_adapter(folder: Path, seed: int = 0) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    config, weights = adapter_files(seed)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


async def call(
    service: TestService, path: str, body: dict[str, Any], key: str = "acme:inference"
) -> tuple[int, Any]:
    async with service.client(key) as client:
        reply = await client.post(path, json=body)
        is_json = reply.headers["content-type"].split(";")[0].endswith("json")
        return reply.status_code, reply.json() if is_json else reply.text


async def test_an_adapter_under_a_root_is_loaded_served_and_unloaded_for_its_tenant(tmp_path):
    sources = AdapterSources(SourcePolicy(), roots=[tmp_path / "shared"])
    legal = put_adapter(tmp_path / "shared" / "legal")
    outside = put_adapter(tmp_path / "elsewhere")
    order = {"lora_name": "legal", "lora_path": legal}
    async with running_service(tmp_path, sources=sources) as service:
        service.engine.script = lambda request: [7]
        load, unload = "/t/acme/v1/load_lora_adapter", "/t/acme/v1/unload_lora_adapter"
        status, text = await call(service, load, order, "admin")
        assert (status, text) == (200, "Success: LoRA adapter 'legal' added successfully.")
        ask = {"model": "legal", "prompt": "x", "max_tokens": 1}
        assert (await call(service, "/v1/completions", ask))[0] == 200
        assert (await call(service, "/v1/completions", ask, "zen:inference"))[0] == 404
        for body, key, path, expected in [
            (order, "admin", load, (400, "adapter_exists")),
            ({**order, "lora_name": "base"}, "admin", load, (400, "name_reserved")),
            ({"lora_name": "b", "lora_path": outside}, "admin", load, (403, "source_not_allowed")),
            ({"lora_name": "b", "lora_path": f"{legal}/../../elsewhere"}, "admin", load,
             (400, "invalid_source")),
            ({"lora_name": "b", "lora_path": "org/name"}, "admin", load, (400, "invalid_value")),
            ({"lora_name": "b"}, "admin", load, (400, "missing_field")),
            ({**order, "lora_name": "b"}, "acme:tenant", load, (403, "source_not_allowed")),
            (order, "acme:inference", load, (403, "insufficient_scope")),
            ({"lora_name": "none"}, "admin", unload, (404, "adapter_not_found")),
            ({"lora_name": "legal"}, "zen:tenant", unload, (404, "tenant_not_found")),
        ]:  # fmt: skip
            status, answer = await call(service, path, body, key)
            assert (status, answer["error"]["code"]) == expected, (body, key, answer)
        put_adapter(tmp_path / "shared" / "legal", seed=1)
        status, _ = await call(service, load, {**order, "load_inplace": True}, "admin")
        assert status == 200
        assert len(await service.registry.list_versions("acme", "legal")) == 2
        status, text = await call(
            service, "/v1/unload_lora_adapter", {"lora_name": "legal"}, "acme:tenant"
        )
        assert (status, text) == (200, "Success: LoRA adapter 'legal' removed successfully.")
        assert service.engine.forgotten == [("acme", "legal")]
        assert (await call(service, "/v1/completions", ask))[0] == 404


async def test_prompts_are_tokenised_as_requests_with_them_are(tmp_path):
    async with running_service(tmp_path, chat_template=HERMES) as service:
        service.engine.script = lambda request: [7]
        for path, prompt in [
            ("completions", {"prompt": "Hello world"}),
            ("chat/completions", {"messages": MESSAGES}),
            ("chat/completions", {
                "messages": [*MESSAGES, {"role": "assistant", "content": "Well"}],
                "continue_final_message": True, "add_generation_prompt": False,
            }),
        ]:  # fmt: skip
            status, _ = await call(service, f"/v1/{path}", {"model": "base", **prompt})
            assert status == 200
            sent = list(service.engine.requests.values())[-1].prompt_token_ids
            status, reply = await call(
                service, "/tokenize", {"model": "base", **prompt, "return_token_strs": True}
            )
            assert (status, reply["tokens"], reply["count"]) == (200, sent, len(sent))
            assert reply["max_model_len"] == 64
            assert reply["token_strs"] == [service.tokenizer.token_text(id) for id in sent]
            status, back = await call(service, "/t/acme/detokenize", {"tokens": sent})
            assert (status, back["prompt"]) == (200, service.tokenizer.decode(sent, False))
        tool = {"type": "function", "function": {"name": "f"}}
        _, plain = await call(service, "/tokenize", {"messages": MESSAGES})
        _, tools = await call(service, "/tokenize", {"messages": MESSAGES, "tools": [tool]})
        assert plain["token_strs"] is None and tools["count"] > plain["count"]


async def test_bad_tokenize_calls_are_refused_by_name(tmp_path):
    async with running_service(tmp_path) as service:
        for path, body, expected in [
            ("/tokenize", {}, (400, "prompt")),
            ("/tokenize", {"prompt": "a", "messages": MESSAGES}, (400, "prompt")),
            ("/tokenize", {"prompt": 5}, (400, "prompt")),
            ("/tokenize", {"messages": [{"role": "user"}]}, (400, "messages[0].content")),
            ("/tokenize", {"prompt": "a", "model": "nobody"}, (404, None)),
            ("/detokenize", {"tokens": [400]}, (400, "tokens")),
            ("/detokenize", {"tokens": [-1]}, (400, "tokens")),
            ("/detokenize", {"tokens": [1] * 65}, (400, "tokens")),
            ("/detokenize", {}, (400, "tokens")),
        ]:
            status, answer = await call(service, path, body)
            assert (status, answer["error"]["param"]) == expected, (path, body, answer)


async def test_the_version_is_told_to_those_with_a_key(tmp_path):
    async with running_service(tmp_path) as service:
        async with service.client(None) as client:
            assert (await client.get("/version")).status_code == 401
        async with service.client() as client:
            reply = await client.get("/version")
            assert reply.status_code == 200 and list(reply.json()) == ["version"]


async def test_endpoints_that_are_not_there_say_so(tmp_path):
    async with running_service(tmp_path) as service:
        for path in ("responses", "embeddings"):
            status, answer = await call(service, f"/v1/{path}", {"model": "base", "input": "x"})
            assert (status, answer["error"]["code"]) == (404, "endpoint_not_supported")
            assert answer["error"]["type"] == "not_found_error"
