"""The version of this service."""

from importlib.metadata import PackageNotFoundError, version


def service_version() -> str:
    """Return the installed version; `0.0.0` from a checkout that is not installed."""
    try:
        return version("loraplex")
    except PackageNotFoundError:
        return "0.0.0"
