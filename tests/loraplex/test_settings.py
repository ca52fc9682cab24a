"""Settings: read from the environment once, checked, and handed on as JSON."""

import msgspec
import pytest

from loraplex.settings import Settings, SettingsError

GIVEN = {
    "database_url": "sqlite:////x.db", "blobs_dir": "/b", "cache_dir": "/c", "uploads_dir": "/u",
    "usage_dir": "/s",
    "engine_socket": "/s", "model_dir": "/m",
}  # fmt: skip


def test_variables_are_read_by_field_name_and_given_values_win():
    environ = {
        "LORAPLEX_ADMIN_KEY": "k" * 32,
        "LORAPLEX_MAX_BODY_BYTES": "123",
        "LORAPLEX_KEEP_ALIVE_SECONDS": "2.5",
        "LORAPLEX_SERVED_MODEL_NAMES": "a,b",
        "LORAPLEX_DATABASE_URL": "sqlite:////other.db",
        "MAX_BODY_BYTES": "7",
    }
    settings = Settings.from_env(environ, **GIVEN)
    assert settings.auth.admin_key == "k" * 32
    assert settings.requests.max_body_bytes == 123
    assert settings.streams.keep_alive_seconds == 2.5
    assert settings.model.served_model_names == ("a", "b")
    assert settings.storage.database_url == GIVEN["database_url"]
    assert Settings.from_env({}, **GIVEN).requests.max_body_bytes == 4 * 2**20


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LORAPLEX_MAX_BODY_BYTES", "many"),
        ("LORAPLEX_MAX_BODY_BYTES", "0"),
        ("LORAPLEX_UPLOAD_SECONDS", "-1"),
        ("LORAPLEX_ADMIN_KEY", "short"),
    ],
)
def test_a_wrong_variable_is_named(variable, value):
    with pytest.raises(SettingsError, match=variable):
        Settings.from_env({variable: value}, **GIVEN)


def test_a_wrong_key_is_not_repeated_in_the_message_which_says_how_to_make_one():
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({"LORAPLEX_ADMIN_KEY": "hunter2"}, **GIVEN)
    assert "hunter2" not in str(caught.value) and "openssl rand" in str(caught.value)


def test_settings_survive_the_way_to_another_process():
    settings = Settings.from_env({"LORAPLEX_MAX_STOP": "3"}, **GIVEN)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings
