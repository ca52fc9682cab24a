"""`loraplex serve`: one engine process and the API processes, kept alive and stopped in order."""
