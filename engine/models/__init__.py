"""One decoder, driven by the Hugging Face config: Llama, SmolLM, Mistral, Qwen2/2.5, Qwen3."""
