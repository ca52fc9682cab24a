"""`/docs`: the OpenAPI document as a page that loads nothing, so that it works offline."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from litestar.connection import Request
from litestar.openapi.plugins import JsonRenderPlugin, OpenAPIRenderPlugin

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
code, pre { font: 13px/1.45 ui-monospace, monospace }
summary { cursor: pointer; padding: .3rem 0 }
details { border-bottom: 1px solid #8884 }
details > *:not(summary) { margin-left: 1rem }
pre { overflow-x: auto; background: #8882; padding: .6rem }
b { display: inline-block; min-width: 4rem }
"""
_TENANT_PATHS = "/t/{tenant_name}/"
_METHODS = ("get", "put", "post", "patch", "delete")

_Json = Mapping[str, Any]


class DocsPage(OpenAPIRenderPlugin):
    """One HTML page, no script, no foreign host."""

    def __init__(self) -> None:
        super().__init__(path="/")

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Return the page."""
        return docs_page(json.loads(self.render_json(request, openapi_schema))).encode()


class JsonDocument(JsonRenderPlugin):
    """The document itself, whose summaries are sentences: what lists of operations show."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Return the document."""
        for item in openapi_schema["paths"].values():
            for method in _METHODS:
                operation = item.get(method)
                if operation is not None and operation.get("description"):
                    operation["summary"] = first_sentence(operation["description"])
        return super().render(request, openapi_schema)


def first_sentence(text: str) -> str:
    """Return the beginning of a text, to the end of its first sentence, on one line."""
    return " ".join(text.split()).partition(". ")[0].removesuffix(".") + "."


def docs_page(document: _Json) -> str:
    """Return the document's operations, by tag, each with its parameters, body and replies.

    Paths under `/t/{tenant}` are the same as those beside them, and are left out.
    """
    operations: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        if path.startswith(_TENANT_PATHS):
            continue
        for method in _METHODS:
            if method in item:
                operation: _Json = item[method]
                tag = (operation.get("tags") or ["other"])[0]
                operations.setdefault(tag, []).append(_operation(method, path, operation))
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    sections = "".join(
        f"<h2>{escape(tag)}</h2>{''.join(found)}" for tag, found in sorted(operations.items())
    )
    schemas = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"{_pre(schema)}</details>"
        for name, schema in sorted(document.get("components", {}).get("schemas", {}).items())
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1>"
        "<p>Every call but <code>/health</code> needs <code>Authorization: Bearer &lt;key&gt;"
        "</code>. All under <code>/v1</code> is also at <code>/t/{tenant}/v1</code>. "
        'The same for machines: <a href="/docs/openapi.json">openapi.json</a>.</p>'
        f"{sections}<h2>schemas</h2>{schemas}</html>"
    )


def _operation(method: str, path: str, operation: _Json) -> str:
    about = operation.get("description") or operation.get("summary") or ""
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> "
        f"{escape(about)}</summary>{''.join(_parts(operation))}</details>"
    )


def _parts(operation: _Json) -> Iterator[str]:
    names = [parameter["name"] for parameter in operation.get("parameters", ())]
    if names:
        yield f"<p>In the path: <code>{escape(', '.join(names))}</code></p>"
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body, <code>{escape(media_type)}</code>:</p>{_pre(content['schema'])}"
    for status, reply in sorted(operation.get("responses", {}).items()):
        about = escape(reply.get("description", ""))
        yield f"<p><b>{escape(status)}</b> {about} {_link(reply)}</p>"


def _link(reply: _Json) -> str:
    for content in reply.get("content", {}).values():
        name = str(content.get("schema", {}).get("$ref", "")).rpartition("/")[2]
        if name:
            return f'<a href="#{escape(name)}"><code>{escape(name)}</code></a>'
    return ""


def _pre(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2))}</pre>"
