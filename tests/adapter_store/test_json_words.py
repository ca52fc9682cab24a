import msgspec
import pytest

from adapter_store.json_words import in_json_words


@pytest.mark.parametrize(
    ("type_", "raw", "words"),
    [
        (str, b"1", "Expected `string`, got `integer`"),
        (int, b'"x"', "Expected `integer`, got `string`"),
        (float, b"true", "Expected `number`, got `boolean`"),
        (bool | None, b"[]", "Expected `boolean | null`, got `array`"),
        (int | float | None, b"{}", "Expected `integer | number | null`, got `object`"),
        (list[str], b"[1]", "Expected `string`, got `integer` - at `$[0]`"),
        (dict[str, int], b"2.5", "Expected `object`, got `number`"),
    ],
)
def test_types_are_those_of_json(type_: object, raw: bytes, words: str):
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(raw, type=type_)
    assert in_json_words(str(error.value)) == words


def test_other_words_stay_as_they_are():
    for text in ("Object missing required field `str`", "int is a word", "Expected `a_int`"):
        assert in_json_words(text) == text
