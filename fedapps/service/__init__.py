"""A finished run as a thing to serve: every later client gets its model."""

DEPLOYMENT = "deployment.json"  # in the folder of a deployment
NOTED_RUNS = "runs.txt"  # there: the folders of the runs that its SuperLink carried, a line each
DEPLOYMENT_VARIABLE = "FEDAPPS_DEPLOYMENT"  # that folder, for the SuperLink's processes
