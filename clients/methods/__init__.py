"""The client half of each method: one file a method; shared bases begin with an underscore."""
