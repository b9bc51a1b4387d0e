# The package and Flower's commands. compose.yaml runs a federation of these images.
FROM python:3.12-slim
RUN pip install --no-cache-dir uv
WORKDIR /app
COPY . .
RUN uv pip install --system --compile-bytecode --constraint constraints.txt --editable .
ENV FLWR_TELEMETRY_ENABLED=0
ENTRYPOINT []
CMD ["fedapps", "--help"]
