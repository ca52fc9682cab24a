"""The recorder: what the engine tells of its work, kept in SQL for the dashboard's pages."""
