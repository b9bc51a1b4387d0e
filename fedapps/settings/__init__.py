"""Configuration: what a run may be set to, and how settings are read, checked and combined."""
