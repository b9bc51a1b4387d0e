"""What runs on the server: Flower strategies and their maths."""
