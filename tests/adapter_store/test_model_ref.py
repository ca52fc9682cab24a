import pytest

from adapter_store.errors import InvalidName, ModelNotFound, NameReserved
from adapter_store.model_ref import (
    ModelRef,
    check_adapter_name,
    check_alias,
    check_tenant_name,
    parse_model_ref,
)


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("support", ModelRef("support")),
        ("a", ModelRef("a")),
        ("7b.v1_x-y", ModelRef("7b.v1_x-y")),
        ("support@3", ModelRef("support", version=3)),
        ("support@2147483647", ModelRef("support", version=2147483647)),
        ("support:canary-2", ModelRef("support", alias="canary-2")),
        ("n" * 64, ModelRef("n" * 64)),
    ],
)
def test_model_strings_name_a_version_or_an_alias(text: str, ref: ModelRef):
    assert parse_model_ref(text) == ref
    assert str(ref) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "A", "Support", "-a", "a-", ".a", "a.", "a/b", "../a", "a\\b", "a\0", "a\n", "a b",
        "\uff41",
        "a@", "a@0", "a@01", "a@-1", "a@1.0", "a@x", "a@1@2", "a@1:x", "a@²", "a@2147483648",
        "a@" + "9" * 5000, "a:", "a:X", "a:1", "a:x:y", "a:x@1", "a:" + "x" * 32, "a:x\n",
        "n" * 65, "n" * 10_000, "%2e%2e", "a%2fb",
    ],
)  # fmt: skip
def test_mistyped_models_are_not_found_and_their_names_are_cut_short(text: str):
    with pytest.raises(ModelNotFound) as caught:
        parse_model_ref(text)
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a\n", "a@1", "a:x", "n" * 65, "ä", "a-"])
def test_names_of_another_form_are_refused(name: str):
    with pytest.raises(InvalidName):
        check_adapter_name(name)
    with pytest.raises(InvalidName):
        check_tenant_name(name)


@pytest.mark.parametrize("alias", ["", "1a", "Prod", "a_b", "a.b", "a" * 32, "-a", "a\n"])
def test_aliases_of_another_form_are_refused(alias: str):
    with pytest.raises(InvalidName):
        check_alias(alias)


@pytest.mark.parametrize("name", ["base", "smollm2", "my-model"])
def test_the_names_of_the_base_model_are_kept_for_it_in_any_case(name: str):
    with pytest.raises(NameReserved):
        check_adapter_name(name, frozenset({"SmolLM2", "my-model"}))
    check_adapter_name(name + "-x", frozenset({"SmolLM2", "my-model"}))
