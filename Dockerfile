# The package and Flower's commands. compose.yaml runs a federation of these images.
FROM python:3.12-slim
RUN pip install --no-cache-dir uv
WORKDIR /app
COPY . .
RUN uv pip install --system --compile-bytecode --constraint constraints.txt --editable .
# Any user may write here, as with `docker run --user 1000`; new volumes get the folders' modes.
RUN mkdir --mode 1777 /flwr /data /results /state
ENV FLWR_TELEMETRY_ENABLED=0 FLWR_HOME=/flwr HOME=/tmp
ENTRYPOINT []
CMD ["fedapps", "--help"]
