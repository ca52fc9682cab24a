"""What runs where: devices behind a protocol, memory, graphs of decode steps, adapter transfers."""
