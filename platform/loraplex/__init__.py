"""The service: tenancy, the OpenAI surface, adapter registration, and the command line."""
