"""One decoder, driven by the Hugging Face config, for every family of `families`."""
