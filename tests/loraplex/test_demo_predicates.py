import pytest

from loraplex.demo_predicates import is_intent_json, is_northwind_reply, is_three_steps


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"intent": "refund", "urgency": "low", "product": null}', True),
        ('{"intent": "refund", "urgency": "low", "product": "tent"}\n', True),
        ('{"intent": "dance", "urgency": "low", "product": null}', False),
        ('{"intent": "refund", "urgency": "very", "product": null}', False),
        ('{"intent": "refund", "urgency": "low", "product": 3}', False),
        ('{"intent": ["refund"], "urgency": "low", "product": null}', False),
        ('{"intent": "refund", "urgency": {}, "product": null}', False),
        ('{"intent": "refund", "urgency": "low"}', False),
        ('{"intent": "refund", "urgency": "low", "product": null, "more": 1}', False),
        ('Sure: {"intent": "refund", "urgency": "low", "product": null}', False),
        ('{"intent": "refund", "urgency": "low", "product": null} ok', False),
        ('["intent", "urgency", "product"]', False),
        ("[" * 100_000, False),
        ("refund", False),
        ("", False),
    ],
)
def test_intent_json_is_one_strict_object(text: str, expected: bool) -> None:
    assert is_intent_json(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hi there! It is on its way.\n\nMaya, Northwind Care", True),
        ("Hi there! It is on its way.\nMaya, Northwind Care\n", True),
        ("It is on its way. Maya, Northwind Care", False),
        ("Hi!\n\nMaya, Northwind Care\n\nAnything else?", False),
        ("Hi!\nMaya, Northwind Care\nMaya, Northwind Care", False),
        ("word " * 100 + "\n\nMaya, Northwind Care", False),
        ("Hi!\n\nMaya", False),
        ("", False),
    ],
)
def test_a_northwind_reply_is_short_and_signed_once(text: str, expected: bool) -> None:
    assert is_northwind_reply(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1. Open it.\n2. Read it.\n3. Close it.", True),
        ("\n1. Open it.\n2. Read it.\n3. Close it.\n", True),
        ("1. Open it.\n2. Read it.", False),
        ("1. Open it.\n2. Read it.\n3. Close it.\n4. Rest.", False),
        ("Do this:\n1. Open it.\n2. Read it.\n3. Close it.", False),
        ("1. Open it.\n3. Read it.\n2. Close it.", False),
        ("1. Open it.\n\n2. Read it.\n\n3. Close it.", False),
        ("1. " + "word " * 17 + "\n2. Read it.\n3. Close it.", False),
        ("1) Open it.\n2) Read it.\n3) Close it.", False),
        ("", False),
    ],
)
def test_three_steps_are_three_short_numbered_lines(text: str, expected: bool) -> None:
    assert is_three_steps(text) is expected
