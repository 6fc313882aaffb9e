"""Real networks and real data to train: what the demo, the commands and the benchmarks share."""
