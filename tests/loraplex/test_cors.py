"""Calls from web pages of other origins."""

import pytest

from loraplex.cors import cors_config
from loraplex.settings import CorsSettings, SettingsError
from tests.support.service import running_service

pytestmark = pytest.mark.anyio

PAGE = "https://app.example.com"
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


async def test_no_page_may_call_unless_its_origin_is_listed(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        before = await client.options("/v1/chat/completions", headers=ASKS)
        reply = await client.get("/v1/models", headers={"origin": PAGE})
    assert reply.status_code == 200, "other clients may send an origin"
    for headers in (before.headers, reply.headers):
        assert not [name for name in headers if name.startswith("access-control-")]


async def test_a_listed_page_may_call_with_a_key_and_see_what_a_client_needs(tmp_path):
    async with (
        running_service(tmp_path, cors_origins=(PAGE,)) as service,
        service.client() as client,
    ):
        before = await client.options("/v1/chat/completions", headers=ASKS)
        assert before.status_code == 204, "it is asked without a key"
        assert before.headers["access-control-allow-origin"] == PAGE
        assert "x-stainless-lang" in before.headers["access-control-allow-headers"]
        reply = await client.get("/v1/models", headers={"origin": PAGE})
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert "retry-after" in reply.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in reply.headers, "no cookies"
        other = {**ASKS, "origin": "https://evil.example.com"}
        refused = await client.options("/v1/chat/completions", headers=other)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("text", ["app.example.com", "https://app.example.com/", "ftp://x", ""])
def test_what_is_no_origin_is_refused_by_name(text):
    with pytest.raises(SettingsError, match="LORAPLEX_CORS_ORIGINS"):
        cors_config(CorsSettings(cors_origins=(text,)))
