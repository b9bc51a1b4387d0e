"""The server half of each method: one file a method; shared bases begin with an underscore."""
