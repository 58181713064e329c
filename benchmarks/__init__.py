"""What publishd costs, as ratios to named peers in the same run: `scripts/bench`."""
