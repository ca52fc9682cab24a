"""Parts of a label, `name@N`."""


def name_of(label: str) -> str:
    """The adapter's name in its label; the whole label where it names no version."""
    name, at, _ = label.rpartition("@")
    return name if at else label


def version_of(label: str) -> int | None:
    """The version in an adapter's label; None where it names none."""
    _, at, version = label.rpartition("@")
    return int(version) if at and version.isdecimal() else None
