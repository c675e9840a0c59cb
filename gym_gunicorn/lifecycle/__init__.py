"""The lives of the arbiter and of a worker: gunicorn's hooks, the socket directory, starting and stopping."""
