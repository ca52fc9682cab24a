"""`loraplex demo`: the whole product in one command, on a real model with trained adapters."""
