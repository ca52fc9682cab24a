"""litellm and langchain-openai against the service: each understands what the other says."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.grammar_service import grammar_service

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("client", ["litellm", "langchain"])
async def test_a_client_of_others_gets_schemas_calls_streams_and_errors(tmp_path, client):
    async with grammar_service(tmp_path) as service:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.other_clients", client, service.url,
            cwd=ROOT,
            env={
                **os.environ,
                "LORAPLEX_API_KEY": service.keys["acme:inference"],
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it calls home
                "LANGSMITH_TRACING": "false",
            },
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()[-3000:]
    said = json.loads(out.splitlines()[-1])
    for text in (said["whole"], said["streamed"]):
        assert json.loads(text)["intent"] in ("refund", "invoice")
    name, arguments = said["call"]
    assert name == "ticket" and arguments["intent"] in ("refund", "invoice")
    assert said["total_tokens"] > 20
    assert said["refusal"] == "not found"
