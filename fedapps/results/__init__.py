"""What a run leaves in its folder, and how it is shown."""
