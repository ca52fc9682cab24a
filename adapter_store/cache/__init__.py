"""What the API processes of a service share beside the database: a cache and its events."""
