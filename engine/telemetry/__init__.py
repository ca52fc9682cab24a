"""What the engine did, for whoever watches: records of requests, steps and slots, and totals."""
