"""The operator's page at `/dashboard`: what waits, for what, and since when."""
