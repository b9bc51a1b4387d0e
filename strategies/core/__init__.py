"""What every strategy uses: rounds, messages, replies, limits, privacy, saved state."""
