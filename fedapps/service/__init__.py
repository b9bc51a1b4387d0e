"""A finished run as a thing to serve: every later client gets its model."""

DEPLOYMENT = "deployment.json"  # in the folder of a deployment
