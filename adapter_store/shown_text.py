"""Text from an upload in messages: short, and printable whatever it holds."""


def shown(text: str, *, quote: bool = True) -> str:
    """About 200 characters of a text, in quotes unless told otherwise."""
    clipped = text if len(text) <= 200 else f"{text[:190]}…"
    printable = ascii(clipped)[1:-1] if not clipped.isprintable() else clipped
    return f"'{printable}'" if quote else printable
