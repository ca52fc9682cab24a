"""Which sequences run in each step, of which adapters, in which blocks: no tensor in here."""
