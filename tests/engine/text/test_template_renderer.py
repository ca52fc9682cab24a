"""Templates of tenants: rendered as the model's own are, and harmless whatever they do."""

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest

from engine.text.chat_template import ChatTemplate
from engine.text.errors import ChatTemplateError
from engine.text.template_renderer import TemplateRenderer

pytestmark = pytest.mark.anyio

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SOURCE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ extra }}"
)
MESSAGES = [{"role": "user", "content": "Grüße, 世界"}]
OPTIONS = {
    "add_generation_prompt": False,
    "continue_final_message": False,
    "tools": None,
    "template_kwargs": {"extra": "!"},
}


@pytest.fixture
async def renderer() -> AsyncIterator[TemplateRenderer]:
    async with TemplateRenderer(SPECIAL) as opened:
        yield opened


async def test_text_is_what_the_template_gives_in_this_process(renderer):
    expected = ChatTemplate(SOURCE, SPECIAL).render(MESSAGES, **OPTIONS)
    assert await renderer.render("a", SOURCE, MESSAGES, OPTIONS) == expected
    assert expected == "<s>[user] Grüße, 世界!"


async def test_a_worker_keeps_no_more_of_one_job_than_its_template(renderer):
    counts = (
        "{% set n = namespace(v=0) %}{% for m in messages %}{% set n.v = n.v + 1 %}{% endfor %}"
    )
    for number in (1, 2, 1):
        text = await renderer.render("a", counts + "{{ n.v }}", MESSAGES * number, OPTIONS)
        assert text == str(number)


async def test_it_says_whether_tools_are_shown(renderer):
    assert not await renderer.takes_tools("a", SOURCE)
    assert await renderer.takes_tools("a", "{{ tools }}")


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("{% for %}", "invalid_chat_template"),
        ("{{ raise_exception('no system role') }}", "invalid_messages"),
        ("{{ ''.__class__.__mro__ }}{{ messages.__class__.x.y }}", "invalid_messages"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
         "chat_template_failed"),
        ("{{ messages[0].content * 10**9 }}", None),
        ("{{ 'a' * 10**10 }}", None),
        ("{{ 9 ** (9 ** 9) }}", None),
        ("{{ '%0999999999d' | format(1) }}", None),
        ("(" * 3 + "{{ " + "(" * 5000 + ")" * 5000 + " }}", None),
    ],
    ids=["syntax", "refuses", "climbs", "loops", "doubles", "folds", "powers", "formats", "nests"],
)  # fmt: skip
async def test_a_hostile_template_is_an_error_and_the_next_one_is_served(renderer, source, code):
    with pytest.raises(ChatTemplateError) as caught:
        await renderer.render("bad", source, MESSAGES, OPTIONS)
    codes = ("chat_template_failed", "invalid_messages", "invalid_chat_template")
    assert caught.value.code in ((code,) if code else codes)
    assert (await renderer.render("good", SOURCE, MESSAGES, OPTIONS)).endswith("!")


async def test_a_tenants_slow_templates_leave_a_worker_to_others(renderer):
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    blocked = [
        asyncio.create_task(renderer.render("bad", slow, MESSAGES, OPTIONS)) for _ in range(3)
    ]
    assert (await renderer.render("good", SOURCE, MESSAGES, OPTIONS)).endswith("!")
    assert not all(task.done() for task in blocked)
    for task in blocked:
        task.cancel()
    ends = await asyncio.gather(*blocked, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError | ChatTemplateError) for end in ends)


async def test_a_worker_sees_nothing_of_the_services_environment(renderer, monkeypatch):
    monkeypatch.setenv("LORAPLEX_ADMIN_KEY", "k" * 40)
    await renderer.render("a", SOURCE, MESSAGES, OPTIONS)
    [worker] = renderer._idle
    environment = await anyio.Path(f"/proc/{worker.pid}/environ").read_bytes()
    assert b"PYTHONPATH" in environment and b"LORAPLEX" not in environment
