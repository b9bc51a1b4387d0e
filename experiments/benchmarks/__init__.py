"""Speed and memory as ratios; not part of the wheel."""
